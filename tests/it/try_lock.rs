//! Trying without waiting.

use futures::future::join_all;
use zklock::{Mutex, TryLockError};

use crate::{assert_free, children, place, within};

#[tokio::test(flavor = "multi_thread")]
async fn a_free_lock_is_taken_and_a_held_one_is_not() {
    let place = place("try").await;
    let (client, other) = (place.connect().await, place.connect().await);
    let mutex = Mutex::new(&client, "/mylock").unwrap();
    let guard = mutex.try_lock().await.unwrap();
    for client in [&client, &other] {
        let result = Mutex::new(client, "/mylock").unwrap().try_lock().await;
        assert_eq!(result.unwrap_err(), TryLockError::WouldBlock);
    }
    guard.release().await.unwrap();
    Mutex::new(&other, "/mylock").unwrap().try_lock().await.unwrap().release().await.unwrap();
    assert_free(&client, "/mylock").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_try_in_vain_writes_nothing() {
    let place = place("try-reads").await;
    let client = place.connect().await;
    let mutex = Mutex::new(&client, "/mylock").unwrap();
    let guard = mutex.lock().await.unwrap();
    let (_, before) = client.get_children("/mylock").await.unwrap();
    for _ in 0..10 {
        assert_eq!(mutex.try_lock().await.unwrap_err(), TryLockError::WouldBlock);
    }
    let (names, after) = client.get_children("/mylock").await.unwrap();
    assert_eq!(names.len(), 1);
    assert_eq!(after, before, "the lock's node was written to");
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_tries_at_once_one_at_most_succeeds_and_none_leaves_a_node() {
    let place = place("try-race").await;
    let clients = join_all((0..8).map(|_| place.connect())).await;
    for _ in 0..20 {
        let tries = join_all(clients.iter().map(|client| {
            let mutex = Mutex::new(client, "/mylock").unwrap();
            async move { mutex.try_lock().await }
        }));
        let mut guards: Vec<_> = within("all tries", tries)
            .await
            .into_iter()
            .filter_map(|result| match result {
                Ok(guard) => Some(guard),
                Err(TryLockError::WouldBlock) => None,
                Err(error) => panic!("{error}"),
            })
            .collect();
        assert!(guards.len() <= 1);
        assert_eq!(children(&clients[0], "/mylock").await.len(), guards.len(), "a try left its node");
        if let Some(guard) = guards.pop() {
            guard.release().await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_can_be_tried_again_right_after_a_try_in_vain() {
    let place = place("try-again").await;
    let client = place.connect().await;
    let mutex = Mutex::new(&client, "/mylock").unwrap();
    for _ in 0..20 {
        let guard = mutex.try_lock().await.expect("no ghost of an earlier try is in the queue");
        assert_eq!(mutex.try_lock().await.unwrap_err(), TryLockError::WouldBlock);
        guard.release().await.unwrap();
    }
}
