//! Looking at the queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use zklock::zookeeper::{Acls, CreateMode};
use zklock::{Mutex, Options};

use crate::{children, place, until_queued, within};

#[tokio::test(flavor = "multi_thread")]
async fn the_queue_shows_the_holder_first_and_who_they_all_are() {
    let place = place("queue").await;
    let (client, other) = (place.connect().await, place.connect().await);
    let labelled = |label: &str| Options::default().label(label);
    let holder = Mutex::with_options(&client, "/mylock", labelled("host-1")).unwrap();
    assert_eq!(holder.queue().await.unwrap(), [], "a lock that nobody has used yet");
    let guard = holder.lock().await.unwrap();
    let waiter = Mutex::with_options(&other, "/mylock", labelled("Wärter 鍵 🔑")).unwrap();
    let waiting = tokio::spawn(async move { waiter.lock().await });
    until_queued(&client, "/mylock", 2).await;
    let queue = holder.queue().await.unwrap();
    assert_eq!(queue.iter().map(|w| w.label.as_str()).collect::<Vec<_>>(), ["host-1", "Wärter 鍵 🔑"]);
    assert_eq!(format!("/mylock/{}", queue[0].node), guard.node());
    assert_eq!(queue[0].token, guard.fencing_token());
    assert_eq!((queue[0].session, queue[1].session), (client.session_id(), other.session_id()));
    assert!(queue[0].sequence < queue[1].sequence && queue[0].token < queue[1].token);
    assert!(queue.iter().all(|w| w.age < Duration::from_secs(3600)), "{queue:?}");
    guard.release().await.unwrap();
    within("the waiter", waiting).await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn entries_of_others_are_shown_whatever_bytes_they_hold() {
    let place = place("bytes").await;
    let client = place.connect().await;
    let mutex = Mutex::new(&client, "/mylock").unwrap();
    let guard = mutex.lock().await.unwrap();
    let mode = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
    client.create("/mylock/0f7a3c9e8a524c0e9d3b1d2f3a4b5c6d__lock__", b"\xff\xfe\x00caf\xe9", &mode).await.unwrap();
    let queue = mutex.queue().await.unwrap();
    assert_eq!(queue[1].label, "\u{fffd}\u{fffd}\0caf\u{fffd}");
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_longest_label_fits() {
    let place = place("long-label").await;
    let client = place.connect().await;
    let label = "x".repeat(1_000_000);
    let mutex = Mutex::with_options(&client, "/mylock", Options::default().label(&label)).unwrap();
    let guard = within("the lock", mutex.lock()).await.unwrap();
    assert_eq!(mutex.queue().await.unwrap()[0].label, label);
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_whose_nodes_vanish_meanwhile_is_shown_without_them() {
    let place = place("vanish").await;
    let (client, observer) = (place.connect().await, place.connect().await);
    let is_over = Arc::new(AtomicBool::new(false));
    let workers: Vec<_> = (0..16)
        .map(|_| {
            let (mutex, is_over) = (Mutex::new(&client, "/mylock").unwrap(), is_over.clone());
            tokio::spawn(async move {
                while !is_over.load(Ordering::Relaxed) {
                    mutex.lock().await.unwrap().release().await.unwrap();
                }
            })
        })
        .collect();
    let mutex = Mutex::new(&observer, "/mylock").unwrap();
    let mut seen = 0;
    for _ in 0..100 {
        let queue = mutex.queue().await.unwrap();
        assert!(queue.is_sorted_by(|a, b| a.sequence < b.sequence && a.token < b.token), "{queue:?}");
        seen += queue.len();
    }
    assert!(seen > 0, "the test looked at an empty queue only");
    is_over.store(true, Ordering::Relaxed);
    for worker in workers {
        within("a worker", worker).await.unwrap();
    }
    assert_eq!(children(&client, "/mylock").await.len(), 0);
}
