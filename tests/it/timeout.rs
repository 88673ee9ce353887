//! Waiting for a limited time.

use std::time::{Duration, Instant};

use zklock::{Mutex, TryLockError};
use zklock_support::Proxy;

use crate::{assert_free, children, place, until_queued, within};

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_in_vain_ends_in_time_with_its_entry_gone() {
    let place = place("timeout").await;
    let (client, other) = (place.connect().await, place.connect().await);
    let guard = Mutex::new(&client, "/mylock").unwrap().lock().await.unwrap();
    let mutex = Mutex::new(&other, "/mylock").unwrap();
    for wait in [200, 50, 1, 0] {
        let wait = Duration::from_millis(wait);
        let start = Instant::now();
        let result = within("the time-out", mutex.try_lock_for(wait)).await;
        assert_eq!(result.unwrap_err(), TryLockError::WouldBlock);
        assert!(start.elapsed() >= wait, "gave up too early");
        until_queued(&client, "/mylock", 1).await;
    }
    guard.release().await.unwrap();
    assert_free(&client, "/mylock").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_that_becomes_free_in_time_is_granted() {
    let place = place("in-time").await;
    let client = place.connect().await;
    let mutex = Mutex::new(&client, "/mylock").unwrap();
    let guard = mutex.lock().await.unwrap();
    let waiting = tokio::spawn({
        let mutex = mutex.clone();
        async move { mutex.try_lock_for(Duration::from_secs(600)).await }
    });
    until_queued(&client, "/mylock", 2).await;
    guard.release().await.unwrap();
    within("the grant", waiting).await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_of_years_is_a_wait() {
    let place = place("years").await;
    let client = place.connect().await;
    let mutex = Mutex::new(&client, "/mylock").unwrap();
    for wait in [Duration::MAX, Duration::from_secs(100 * 365 * 24 * 3600)] {
        within("a free lock", mutex.try_lock_for(wait)).await.unwrap().release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_that_gives_up_in_the_middle_does_not_hold_up_those_behind_it() {
    let place = place("middle").await;
    let client = place.connect().await;
    let mutex = Mutex::new(&client, "/mylock").unwrap();
    let guard = mutex.lock().await.unwrap();
    let (impatient, patient) = (mutex.clone(), mutex.clone());
    let middle = tokio::spawn(async move { impatient.try_lock_for(Duration::from_millis(300)).await });
    until_queued(&client, "/mylock", 2).await;
    let last = tokio::spawn(async move { patient.lock().await });
    assert_eq!(middle.await.unwrap().unwrap_err(), TryLockError::WouldBlock);
    until_queued(&client, "/mylock", 2).await;
    assert!(!last.is_finished(), "granted while the lock is held");
    guard.release().await.unwrap();
    within("the last waiter", last).await.unwrap().unwrap().release().await.unwrap();
}

/// The bound on what is measured here is far below the time after which the client itself gives up.
#[tokio::test(flavor = "multi_thread")]
async fn a_time_out_bounds_the_requests_too_while_the_server_is_out_of_reach() {
    let place = place("unreachable").await;
    let admin = place.connect().await;
    for is_silent in [false, true] {
        for is_waiting in [false, true] {
            let proxy = Proxy::start(place.server().connect_string()).await;
            let client = place.connect_through(&proxy, Duration::from_secs(10)).await;
            let mutex = Mutex::new(&client, "/mylock").unwrap();
            let blocker = match is_waiting {
                true => Some(Mutex::new(&admin, "/mylock").unwrap().lock().await.unwrap()),
                false => None,
            };
            let break_off = || if is_silent { proxy.silence() } else { proxy.cut() };
            if !is_waiting {
                break_off();
            }
            let wait = Duration::from_millis(700);
            let start = Instant::now();
            let trying = tokio::spawn(async move { mutex.try_lock_for(wait).await });
            if is_waiting {
                until_queued(&admin, "/mylock", 2).await;
                break_off();
            }
            let result = within("the time-out", trying).await.unwrap();
            let elapsed = start.elapsed();
            assert_eq!(result.unwrap_err(), TryLockError::WouldBlock);
            // The session lasts 10 s, and the client takes 4 s to notice the silence: neither was waited for.
            println!("silent: {is_silent}, waiting: {is_waiting}: returned after {elapsed:?}");
            assert!(elapsed >= wait);
            proxy.restore();
            if let Some(blocker) = blocker {
                blocker.release().await.unwrap();
            }
            until_queued(&admin, "/mylock", 0).await;
            assert_free(&admin, "/mylock").await;
        }
    }
    assert_eq!(children(&admin, "/mylock").await.len(), 0);
}
