//! What is spent while nothing happens, and what is left when all is done, by the server's own count.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures::future::{join_all, try_join_all};
use zklock::zookeeper::{Client, SessionState};
use zklock::{Mutex, TryLockError};

use crate::{children, eventually, quiet_place, within};

/// Long enough that no connection is given up on a machine that is held up for a moment.
const SESSION_TIMEOUT: Duration = Duration::from_secs(20);

/// How many requests a session may make of its own accord in one session time-out, whatever it holds.
const HEARTBEATS: f64 = 0.0;

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_holds_locks_and_waits_for_others_costs_no_more_than_an_idle_one() {
    let (space, _alone) = quiet_place("idle").await;
    let server = space.server();
    let (holder, waiter, idle) = tokio::join!(
        space.connect_with(SESSION_TIMEOUT),
        space.connect_with(SESSION_TIMEOUT),
        space.connect_with(SESSION_TIMEOUT)
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
    let heartbeats = (start.elapsed().div_duration_f64(SESSION_TIMEOUT) * HEARTBEATS).ceil() as u64;

    let received = |client: &Client| {
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

/// How acquisitions ended, of all kinds.
#[derive(Debug, Default)]
struct Ends {
    granted: AtomicUsize,
    would_block: AtomicUsize,
    timed_out: AtomicUsize,
    cancelled: AtomicUsize,
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_acquisitions_of_all_kinds_leave_no_watch_and_no_node() {
    let (space, _alone) = quiet_place("ten-thousand").await;
    let server = space.server();
    const SESSIONS: usize = 8;
    const WORKERS: usize = 64;
    let clients = join_all((0..SESSIONS).map(|_| space.connect_with(SESSION_TIMEOUT))).await;
    let ends = Ends::default();
    let acquire = async |worker: usize, round: usize| {
        let client = &clients[worker % SESSIONS];
        let contended = Mutex::new(client, "/contended").unwrap();
        let free = Mutex::new(client, &format!("/free-{worker}")).unwrap();
        // All moments of a wait come up, in an order that differs from worker to worker.
        let moment = Duration::from_micros(((worker * 37 + round * 13) % 100) as u64 * 800);
        let acquired = match (worker + round) % 10 {
            0..5 => Ok(free.lock().await.unwrap()),
            5..7 => Ok(contended.lock().await.unwrap()),
            7 => contended.try_lock().await.map_err(|error| (error, &ends.would_block)),
            8 => contended.try_lock_for(moment).await.map_err(|error| (error, &ends.timed_out)),
            _ => match tokio::time::timeout(moment, contended.lock()).await {
                Ok(locked) => Ok(locked.unwrap()),
                Err(_) => Err((TryLockError::WouldBlock, &ends.cancelled)),
            },
        };
        let end = match acquired {
            Ok(guard) if round.is_multiple_of(3) => {
                drop(guard);
                &ends.granted
            }
            Ok(guard) => {
                guard.release().await.unwrap();
                &ends.granted
            }
            Err((error, end)) => {
                assert_eq!(error, TryLockError::WouldBlock);
                end
            }
        };
        end.fetch_add(1, Ordering::Relaxed);
    };
    let start = Instant::now();
    let workers = join_all((0..WORKERS).map(|worker| {
        let (ends, acquire) = (&ends, &acquire);
        async move {
            let mut rounds = 0..;
            while ends.granted.load(Ordering::Relaxed) < 10_000 {
                acquire(worker, rounds.next().unwrap()).await;
            }
        }
    }));
    within("10,000 acquisitions", workers).await;
    println!("{ends:?} in {:?}", start.elapsed());
    for in_vain in [&ends.would_block, &ends.timed_out, &ends.cancelled] {
        assert!(in_vain.load(Ordering::Relaxed) > 0, "not of all kinds: {ends:?}");
    }
    eventually("nobody is left in the queues", async || {
        let mut locks = vec!["/contended".to_owned()];
        locks.extend((0..WORKERS).map(|worker| format!("/free-{worker}")));
        join_all(locks.iter().map(|lock| children(&clients[0], lock))).await.iter().all(Vec::is_empty)
    })
    .await;
    // All sessions live on: their end would remove what they watch.
    eventually("no watch is left", async || server.mntr().await.unwrap().watch_count() == 0).await;
    let watches = server.four_letter_word("wchs").await.unwrap();
    assert!(watches.contains("Total watches:0"), "{watches}");
    assert!(clients.iter().all(|client| client.state() == SessionState::SyncConnected));
}
