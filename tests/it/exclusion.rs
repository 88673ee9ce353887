//! One holder at a time, in the order of the queue.

use std::sync::Mutex as StdMutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::future::join_all;
use zklock::{FencingToken, Mutex, MutexGuard};

use crate::{assert_free, place, until_queued, within};

const SESSIONS: usize = 8;
const WAITERS: usize = 8;

/// Sees every holder, one after the other.
#[derive(Default)]
struct Witness {
    inside: AtomicUsize,
    grants: StdMutex<Vec<(String, FencingToken)>>,
}

impl Witness {
    async fn watch(&self, guard: MutexGuard) {
        assert_eq!(self.inside.fetch_add(1, Ordering::SeqCst), 0, "somebody else holds the lock too");
        self.grants.lock().unwrap().push((guard.node().to_owned(), guard.fencing_token()));
        tokio::task::yield_now().await;
        self.inside.fetch_sub(1, Ordering::SeqCst);
        guard.release().await.unwrap();
    }

    fn grants(&self) -> Vec<(String, FencingToken)> {
        self.grants.lock().unwrap().clone()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_of_all_sessions_are_served_one_by_one_in_the_order_of_the_queue() {
    let place = place("order").await;
    let admin = place.connect().await;
    let mutex = Mutex::new(&admin, "/mylock").unwrap();
    let gate = mutex.lock().await.unwrap();
    let witness = Witness::default();
    let clients = join_all((0..SESSIONS).map(|_| place.connect())).await;
    let waiters = join_all((0..SESSIONS * WAITERS).map(|i| {
        let mutex = Mutex::new(&clients[i % SESSIONS], "/mylock").unwrap();
        let witness = &witness;
        async move { witness.watch(mutex.lock().await.unwrap()).await }
    }));
    let open_the_gate = async {
        until_queued(&admin, "/mylock", 1 + SESSIONS * WAITERS).await;
        let queue = mutex.queue().await.unwrap();
        assert_eq!(queue[0].token, gate.fencing_token());
        gate.release().await.unwrap();
        queue
    };
    let (_, queue) = within("all grants", async { tokio::join!(waiters, open_the_gate) }).await;
    let expected: Vec<_> = queue[1..].iter().map(|w| (format!("/mylock/{}", w.node), w.token)).collect();
    assert_eq!(witness.grants(), expected);
    assert_free(&admin, "/mylock").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_rise_from_holder_to_holder_while_all_come_and_go() {
    let place = place("churn").await;
    let witness = Witness::default();
    let clients = join_all((0..SESSIONS).map(|_| place.connect())).await;
    let workers = join_all((0..SESSIONS * WAITERS).map(|i| {
        let mutex = Mutex::new(&clients[i % SESSIONS], "/mylock").unwrap();
        let witness = &witness;
        async move {
            for _ in 0..4 {
                witness.watch(mutex.lock().await.unwrap()).await;
            }
        }
    }));
    within("all grants", workers).await;
    let tokens: Vec<_> = witness.grants().into_iter().map(|(_, token)| token).collect();
    assert_eq!(tokens.len(), SESSIONS * WAITERS * 4);
    assert!(tokens.is_sorted_by(|a, b| a < b), "tokens do not rise: {tokens:?}");
    assert_free(&clients[0], "/mylock").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn locks_of_different_paths_do_not_wait_for_each_other() {
    let place = place("paths").await;
    let client = place.connect().await;
    let one = Mutex::new(&client, "/locks/one").unwrap().lock().await.unwrap();
    let two = within("the other lock", Mutex::new(&client, "/locks/two").unwrap().lock()).await.unwrap();
    assert!(two.fencing_token() > one.fencing_token());
    one.release().await.unwrap();
    two.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_rise_also_when_the_lock_is_made_anew() {
    let place = place("anew").await;
    let client = place.connect().await;
    let mutex = Mutex::new(&client, "/mylock").unwrap();
    let mut last = None;
    for _ in 0..3 {
        let guard = mutex.lock().await.unwrap();
        let token = guard.fencing_token();
        assert!(Some(token) > last, "{token} after {last:?}");
        last = Some(token);
        guard.release().await.unwrap();
        // The server may have been quicker: to it this is an empty container.
        let _ = client.delete("/mylock", None).await;
    }
}
