//! Callers that go: dropped futures, dropped guards, dropped releases.

use std::time::Duration;

use futures::future::join_all;
use zklock::{Mutex, Options, Parents};
use zklock_support::Proxy;

use crate::{assert_free, children, place, until_queued, within};

#[tokio::test(flavor = "multi_thread")]
async fn acquisitions_cut_at_400_moments_leave_no_node_and_the_next_is_granted() {
    let place = place("cancel").await;
    let admin = place.connect().await;
    let proxy = Proxy::start(place.server().connect_string()).await;
    let clients =
        join_all((0..4).map(|_| async { place.connect_through(&proxy, Duration::from_secs(10)).await })).await;
    // Slow enough that every step of an acquisition is hit: create, list, watch, wait, hold, release.
    proxy.delay(Duration::from_millis(2));
    let cut = async |worker: usize, round: usize| {
        let mutex = Mutex::new(&clients[worker % 4], "/mylock").unwrap();
        // Each of the moments of a hundred milliseconds comes up, in an order that differs from worker to worker.
        let moment = Duration::from_micros(((worker * 37 + round * 13) % 400) as u64 * 150);
        let work = async {
            let guard = mutex.lock().await.unwrap();
            match round % 3 {
                0 => drop(guard),
                1 => guard.release().await.unwrap(),
                _ => {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    let _not_polled = guard.release();
                }
            }
        };
        let _ = tokio::time::timeout(moment, work).await;
    };
    let workers = join_all((0..20).map(|worker| async move {
        for round in 0..20 {
            cut(worker, round).await;
        }
    }));
    within("400 acquisitions", workers).await;
    assert_free(&admin, "/mylock").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_that_was_sent_before_its_future_was_dropped_is_taken_back() {
    let place = place("sent").await;
    let admin = place.connect().await;
    // One that the server does not remove as an empty container meanwhile.
    let stays = Options::default().parents(Parents::Persistent);
    Mutex::with_options(&admin, "/mylock", stays).unwrap().lock().await.unwrap().release().await.unwrap();
    let proxy = Proxy::start(place.server().connect_string()).await;
    let client = place.connect_through(&proxy, Duration::from_secs(10)).await;
    let mutex = Mutex::new(&client, "/mylock").unwrap();
    proxy.delay(Duration::from_millis(200));
    // It is on its way to the server, or its answer on the way back.
    assert!(tokio::time::timeout(Duration::from_millis(100), mutex.lock()).await.is_err());
    let before = admin.get_children("/mylock").await.unwrap().1.cversion;
    crate::eventually("the node came", async || {
        admin.get_children("/mylock").await.unwrap().1.cversion > before
            || !children(&admin, "/mylock").await.is_empty()
    })
    .await;
    assert_free(&admin, "/mylock").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_that_goes_leaves_at_once_and_the_next_still_waits_for_the_holder() {
    let place = place("leave").await;
    let client = place.connect().await;
    let mutex = Mutex::new(&client, "/mylock").unwrap();
    let guard = mutex.lock().await.unwrap();
    let going = tokio::spawn({
        let mutex = mutex.clone();
        async move { mutex.lock().await }
    });
    until_queued(&client, "/mylock", 2).await;
    let staying = tokio::spawn({
        let mutex = mutex.clone();
        async move { mutex.lock().await }
    });
    until_queued(&client, "/mylock", 3).await;
    going.abort();
    until_queued(&client, "/mylock", 2).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!staying.is_finished(), "granted while the lock is held");
    guard.release().await.unwrap();
    within("the one that stayed", staying).await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_whose_future_is_dropped_goes_on() {
    let place = place("release-dropped").await;
    let client = place.connect().await;
    let mutex = Mutex::new(&client, "/mylock").unwrap();
    let guard = mutex.lock().await.unwrap();
    let mut release = Box::pin(guard.release());
    assert!(futures::poll!(&mut release).is_pending());
    drop(release);
    assert_free(&client, "/mylock").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_acquisition_does_not_poison_the_next() {
    let place = place("reuse").await;
    let client = place.connect().await;
    let mutex = Mutex::new(&client, "/mylock").unwrap();
    for _ in 0..50 {
        let mut lock = Box::pin(mutex.lock());
        let _ = futures::poll!(&mut lock);
        drop(lock);
    }
    within("the lock", mutex.lock()).await.unwrap().release().await.unwrap();
    assert_free(&client, "/mylock").await;
}
