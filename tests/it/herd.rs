//! What a hand-off costs, counted by the server.

use zklock::Mutex;

use crate::{quiet_place, until_queued, within};

/// Each waiter has a session of its own: the server counts a watch once for all that a session wants it for.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_wakes_one_waiter_however_long_the_queue() {
    let (space, _alone) = quiet_place("herd").await;
    let server = space.server();
    for waiters in [2, 10, 60] {
        let client = space.connect().await;
        let gate = Mutex::new(&client, "/mylock").unwrap().lock().await.unwrap();
        let mut queued = Vec::new();
        for position in 1..=waiters {
            let mutex = Mutex::new(space.connect().await, "/mylock").unwrap();
            queued.push(tokio::spawn(async move { mutex.lock().await.unwrap().release().await.unwrap() }));
            until_queued(&client, "/mylock", 1 + position).await;
        }
        // Its own node, the deletion of the one before it, and, but for the first, the change of that.
        let watches = 3 * waiters as u64 - 1;
        crate::eventually("all are watching", async || server.mntr().await.unwrap().watch_count() == watches).await;
        let before = server.mntr().await.unwrap();
        gate.release().await.unwrap();
        for waiter in queued {
            within("a grant", waiter).await.unwrap();
        }
        let fired = server.mntr().await.unwrap().since(&before);
        let waiters = waiters as u64;
        assert_eq!(fired.node_deleted(), waiters, "the next holder is told of the end of each hold, and nobody else");
        // But for the first, whose predecessor was the only one, and with the releasing holder's watch on its own.
        assert_eq!(fired.node_changed(), 2 * waiters - 1, "the next holder is told that it was a release");
        assert_eq!(fired.node_children(), 0);
        assert_eq!(server.mntr().await.unwrap().watch_count(), 0, "no watch is left");
    }
}
