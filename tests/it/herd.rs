//! What a hand-off costs, counted by the server.

use zklock::Mutex;

use crate::{quiet_place, until_queued, within};

#[tokio::test(flavor = "multi_thread")]
async fn a_release_wakes_one_waiter_however_long_the_queue() {
    let (space, _alone) = quiet_place("herd").await;
    for waiters in [2, 10, 60] {
        let client = space.connect().await;
        let mutex = Mutex::new(&client, "/mylock").unwrap();
        let gate = mutex.lock().await.unwrap();
        let queued: Vec<_> = (0..waiters)
            .map(|_| {
                let mutex = mutex.clone();
                tokio::spawn(async move { mutex.lock().await.unwrap().release().await.unwrap() })
            })
            .collect();
        until_queued(&client, "/mylock", 1 + waiters).await;
        // All have found whom to wait for: the server holds a watch for each of them.
        let server = space.server();
        crate::eventually("all are watching", async || server.mntr().await.unwrap().watch_count() >= waiters as u64)
            .await;
        let before = server.mntr().await.unwrap();
        assert_eq!(before.watch_count(), waiters as u64);
        gate.release().await.unwrap();
        for waiter in queued {
            within("a grant", waiter).await.unwrap();
        }
        let fired = server.mntr().await.unwrap().since(&before);
        assert_eq!(fired.node_deleted(), waiters as u64, "one event for each of the {waiters} who came to their turn");
        assert_eq!((fired.node_changed(), fired.node_children()), (0, 0), "and none else");
        assert_eq!(server.mntr().await.unwrap().watch_count(), 0, "no watch is left");
    }
}
