//! Holders and waiters that die, and connections that break.

use std::time::Duration;

use zklock::{LockError, Mutex, ReleaseError};
use zklock_support::Proxy;

use crate::{assert_free, kill, place, until_queued, within};

#[tokio::test(flavor = "multi_thread")]
async fn when_the_holder_dies_the_next_is_granted() {
    let place = place("holder-dies").await;
    let (dying, client) = (place.connect().await, place.connect().await);
    let guard = Mutex::new(&dying, "/mylock").unwrap().lock().await.unwrap();
    let mutex = Mutex::new(&client, "/mylock").unwrap();
    let waiting = tokio::spawn(async move { mutex.lock().await });
    until_queued(&client, "/mylock", 2).await;
    kill(&dying, &place).await;
    let next = within("the next holder", waiting).await.unwrap().unwrap();
    assert!(next.fencing_token() > guard.fencing_token());
    let node = guard.node().to_owned();
    assert_eq!(guard.release().await, Err(ReleaseError::Lost { node }));
    next.release().await.unwrap();
    assert_free(&client, "/mylock").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_a_waiter_in_the_middle_dies_the_order_of_the_others_stays() {
    let place = place("middle-dies").await;
    let (client, dying) = (place.connect().await, place.connect().await);
    let mutex = Mutex::new(&client, "/mylock").unwrap();
    let first = mutex.lock().await.unwrap();
    let doomed = Mutex::new(&dying, "/mylock").unwrap();
    let middle = tokio::spawn(async move { doomed.lock().await });
    until_queued(&client, "/mylock", 2).await;
    let last = tokio::spawn({
        let mutex = mutex.clone();
        async move { mutex.lock().await }
    });
    until_queued(&client, "/mylock", 3).await;
    kill(&dying, &place).await;
    let error = within("the news", middle).await.unwrap().unwrap_err();
    assert!(matches!(error, LockError::SessionExpired { .. }), "{error}");
    until_queued(&client, "/mylock", 2).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!last.is_finished(), "granted while the lock is held");
    first.release().await.unwrap();
    within("the last", last).await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_is_cut_off_loses_the_lock_when_its_session_ends() {
    let place = place("cut-off").await;
    let proxy = Proxy::start(place.server().connect_string()).await;
    let lost = place.connect_through(&proxy, Duration::from_secs(2)).await;
    let client = place.connect().await;
    let guard = Mutex::new(&lost, "/mylock").unwrap().lock().await.unwrap();
    let mutex = Mutex::new(&client, "/mylock").unwrap();
    let waiting = tokio::spawn(async move { mutex.lock().await });
    until_queued(&client, "/mylock", 2).await;
    proxy.silence();
    let next = within("the next holder", waiting).await.unwrap().unwrap();
    let node = guard.node().to_owned();
    assert_eq!(within("the release", guard.release()).await, Err(ReleaseError::Lost { node }));
    next.release().await.unwrap();
    assert_free(&client, "/mylock").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_and_holders_survive_a_broken_connection() {
    let place = place("reconnect").await;
    let admin = place.connect().await;
    let proxy = Proxy::start(place.server().connect_string()).await;
    let client = place.connect_through(&proxy, Duration::from_secs(20)).await;
    let mutex = Mutex::new(&client, "/mylock").unwrap();
    let guard = mutex.lock().await.unwrap();
    let waiting: Vec<_> = (0..5)
        .map(|_| {
            let mutex = mutex.clone();
            tokio::spawn(async move { mutex.lock().await.unwrap().release().await.unwrap() })
        })
        .collect();
    until_queued(&admin, "/mylock", 6).await;
    // Broken once while everybody waits, and again and again while they hand over.
    proxy.cut();
    proxy.restore();
    guard.release().await.unwrap();
    for waiter in waiting {
        proxy.cut();
        proxy.restore();
        within("a grant", waiter).await.unwrap();
    }
    assert_free(&admin, "/mylock").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_is_over_is_said_to_be_over() {
    let place = place("over").await;
    let client = place.connect().await;
    let mutex = Mutex::new(&client, "/mylock").unwrap();
    kill(&client, &place).await;
    let error = within("the error", mutex.lock()).await.unwrap_err();
    assert!(matches!(&error, LockError::SessionExpired { path, .. } if path == "/mylock"), "{error}");
    assert!(error.to_string().contains("/mylock") && error.to_string().contains("connect again"), "{error}");
    assert!(mutex.try_lock().await.is_err());
    assert!(mutex.try_lock_for(Duration::from_secs(1)).await.is_err());
    assert!(mutex.queue().await.is_err());
}
