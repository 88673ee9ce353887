//! What is spent while nothing happens, and what is left when all is done, by the server's own count.

use std::time::{Duration, Instant};

use futures::future::{join_all, try_join_all};
use zklock::Mutex;

use crate::{eventually, quiet_place, within};

/// How many requests a session may make of its own accord in one session time-out, whatever it holds.
const HEARTBEATS: f64 = 0.0;

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_holds_locks_and_waits_for_others_costs_no_more_than_an_idle_one() {
    let (space, _alone) = quiet_place("idle").await;
    let server = space.server();
    // Long enough that no connection is given up on a machine that is slow for a moment.
    let session_timeout = Duration::from_secs(20);
    let (holder, waiter, idle) = tokio::join!(
        space.connect_with(session_timeout),
        space.connect_with(session_timeout),
        space.connect_with(session_timeout)
    );

    const LOCKS: usize = 30;
    let mutexes = |client| (0..LOCKS).map(move |i| Mutex::new(client, &format!("/lock-{i}")).unwrap());
    let guards =
        within("free locks", try_join_all(mutexes(&holder).map(async |mutex| mutex.lock().await))).await.unwrap();
    // Behind a third of them waits nobody, behind another somebody of the same session, or of another one.
    let queued: Vec<_> = mutexes(&holder)
        .step_by(3)
        .chain(mutexes(&waiter).skip(1).step_by(3))
        .map(|mutex| tokio::spawn(async move { mutex.lock().await.unwrap().release().await.unwrap() }))
        .collect();
    // Its own node and, of the session itself, the holder's own one; of another, the holder's end.
    let watches = 2 * queued.len() as u64;
    eventually("all are watching", async || server.mntr().await.unwrap().watch_count() == watches).await;
    // Answered and counted after all that these sessions have asked for.
    for client in [&holder, &waiter] {
        client.check_stat("/").await.unwrap();
    }

    let start = Instant::now();
    let (before, fired_before) = (server.connections().await.unwrap(), server.mntr().await.unwrap());
    tokio::time::sleep(Duration::from_secs(5)).await;
    let (after, fired) = (server.connections().await.unwrap(), server.mntr().await.unwrap().since(&fired_before));
    let heartbeats = (start.elapsed().div_duration_f64(session_timeout) * HEARTBEATS).ceil() as u64;

    let received = |client: &zklock::zookeeper::Client| {
        let session = client.session_id();
        after.of(session).since(&before.of(session))
    };
    let (of_holder, of_waiter, of_idle) = (received(&holder), received(&waiter), received(&idle));
    println!("of the holder {of_holder:?}, of the waiter {of_waiter:?}, of the idle one {of_idle:?}");
    assert!(of_holder.requests <= heartbeats, "{of_holder:?}");
    assert_eq!(of_waiter.requests, 0);
    // The rest are pings. Two sessions may be a ping or two apart, but not one for each lock.
    for received in [of_holder, of_waiter] {
        assert!(received.packets < of_idle.packets + heartbeats + LOCKS as u64 / 3, "{received:?} against {of_idle:?}");
    }
    assert_eq!(fired.watches_fired(), 0);

    join_all(guards.into_iter().map(|guard| guard.release())).await.into_iter().for_each(|released| released.unwrap());
    for waiter in queued {
        within("a grant", waiter).await.unwrap();
    }
}
