//! Tasks of one session that pass the lock on among themselves.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use tokio::sync::mpsc;
use zklock::zookeeper::Client;
use zklock::{LockError, Mutex, MutexGuard, Options, ReleaseError, TryLockError};

use crate::{assert_free, children, eventually, kill, place, until_queued, within};

fn sharing(client: &Client, holds: u32) -> Mutex {
    Mutex::with_options(client, "/mylock", Options::default().local_handoff(holds)).unwrap()
}

/// Tasks that queue one after the other, and tell when they hold.
async fn line(mutex: &Mutex, count: usize) -> mpsc::UnboundedReceiver<(usize, MutexGuard)> {
    let (granted, grants) = mpsc::unbounded_channel();
    for number in 0..count {
        let (mutex, granted) = (mutex.clone(), granted.clone());
        let (polled, is_polled) = tokio::sync::oneshot::channel();
        tokio::spawn(async move {
            let mut locking = std::pin::pin!(mutex.lock());
            // After its first poll it is in the line.
            assert!(futures::poll!(&mut locking).is_pending());
            polled.send(()).unwrap();
            let _ = granted.send((number, locking.await.unwrap()));
        });
        is_polled.await.unwrap();
    }
    grants
}

#[tokio::test(flavor = "multi_thread")]
async fn one_entry_serves_as_many_holds_as_it_may_and_the_next_one_the_rest() {
    let place = place("cohort-limit").await;
    let client = place.connect().await;
    let mutex = sharing(&client, 4);
    let gate = Mutex::new(place.connect().await, "/mylock").unwrap().lock().await.unwrap();
    let mut grants = line(&mutex, 10).await;
    // 4 + 4 + 2, behind the gate.
    until_queued(&client, "/mylock", 1 + 3).await;
    gate.release().await.unwrap();
    let mut tokens = Vec::new();
    for expected in 0..10 {
        let (number, guard) = within("a grant", grants.recv()).await.unwrap();
        assert_eq!(number, expected, "they hold in the order in which they came");
        assert!(grants.try_recv().is_err(), "one at a time");
        tokens.push(guard.fencing_token());
        guard.release().await.unwrap();
    }
    assert!(tokens.is_sorted());
    let first = tokens[0];
    assert_eq!(tokens.iter().filter(|token| **token == first).count(), 4, "{tokens:?}");
    tokens.dedup();
    assert_eq!(tokens.len(), 3);
    assert_free(&client, "/mylock").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn others_wait_for_no_more_holds_than_an_entry_may_serve() {
    let place = place("cohort-fair").await;
    let (client, other) = (place.connect().await, place.connect().await);
    let mutex = sharing(&client, 5);
    let holds = Arc::new(AtomicUsize::new(0));
    let stop = Arc::new(AtomicUsize::new(0));
    // They want the lock all the time.
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let (mutex, holds, stop) = (mutex.clone(), holds.clone(), stop.clone());
            tokio::spawn(async move {
                while stop.load(SeqCst) == 0 {
                    let guard = mutex.lock().await.unwrap();
                    holds.fetch_add(1, SeqCst);
                    guard.release().await.unwrap();
                }
            })
        })
        .collect();
    let stranger = Mutex::new(&other, "/mylock").unwrap();
    for _ in 0..20 {
        eventually("they are at it", async || holds.load(SeqCst) > 20).await;
        let waiting = tokio::spawn({
            let stranger = stranger.clone();
            async move { stranger.lock().await.unwrap() }
        });
        let node = async || {
            let owner = other.session_id();
            let queue = stranger.queue().await.unwrap();
            queue.iter().any(|waiter| waiter.session == owner).then(|| holds.load(SeqCst))
        };
        let mut seen = None;
        eventually("the stranger is in the queue", async || {
            seen = node().await.or(waiting.is_finished().then_some(usize::MAX));
            seen.is_some()
        })
        .await;
        let guard = within("the stranger's turn", waiting).await.unwrap();
        let passed = holds.load(SeqCst).saturating_sub(seen.unwrap_or_default());
        // Eight tasks have at most three entries of five before the stranger's.
        assert!(passed <= 3 * 5, "{passed} holds while the stranger waited");
        guard.release().await.unwrap();
        holds.store(0, SeqCst);
    }
    stop.store(1, SeqCst);
    for task in tasks {
        within("the end", task).await.unwrap();
    }
    assert_free(&client, "/mylock").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cohorts_of_several_sessions_and_a_stranger_never_hold_at_once() {
    let place = place("cohort-exclusion").await;
    let clients = [place.connect().await, place.connect().await, place.connect().await];
    let inside = Arc::new(AtomicUsize::new(0));
    let grants = Arc::new(AtomicUsize::new(0));
    let tasks: Vec<_> = (0..36)
        .map(|i| {
            let mutex = match i % 3 {
                0 => Mutex::new(&clients[0], "/mylock").unwrap(),
                session => sharing(&clients[session], 7),
            };
            let (inside, grants) = (inside.clone(), grants.clone());
            tokio::spawn(async move {
                for round in 0..20 {
                    let wait = Duration::from_millis(some_millis(i * 31 + round));
                    let guard = match round % 4 {
                        0 => match mutex.try_lock_for(wait).await {
                            Ok(guard) => guard,
                            Err(TryLockError::WouldBlock) => continue,
                            Err(error) => panic!("{error}"),
                        },
                        1 => match tokio::time::timeout(wait, mutex.lock()).await {
                            Ok(guard) => guard.unwrap(),
                            Err(_) => continue,
                        },
                        _ => mutex.lock().await.unwrap(),
                    };
                    assert_eq!(inside.fetch_add(1, SeqCst), 0);
                    tokio::task::yield_now().await;
                    assert_eq!(inside.fetch_sub(1, SeqCst), 1);
                    grants.fetch_add(1, SeqCst);
                    match round % 3 {
                        0 => drop(guard),
                        _ => guard.release().await.unwrap(),
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        within("a task", task).await.unwrap();
    }
    assert!(grants.load(SeqCst) >= 36 * 10);
    assert_free(&clients[0], "/mylock").await;
}

/// Some number of milliseconds below 32.
fn some_millis(seed: usize) -> u64 {
    (seed as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 59
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_entry_is_told_to_its_holder_and_the_others_queue_again_in_their_order() {
    let place = place("cohort-lost").await;
    let client = place.connect().await;
    let mutex = sharing(&client, 100);
    let mut grants = line(&mutex, 6).await;
    let (_, first) = within("the first", grants.recv()).await.unwrap();
    first.release().await.unwrap();
    let (number, second) = within("the second", grants.recv()).await.unwrap();
    assert_eq!(number, 1);
    // The node of the one entry goes under the second holder, which relies on it for all the others.
    place.admin().delete(second.node(), None).await.unwrap();
    let (number, third) = within("the third", grants.recv()).await.unwrap();
    assert_eq!(number, 2);
    assert!(third.fencing_token() > second.fencing_token(), "under a new entry");
    let node = second.node().to_owned();
    assert_eq!(second.release().await, Err(ReleaseError::Lost { node }));
    third.release().await.unwrap();
    for expected in 3..6 {
        let (number, guard) = within("a grant", grants.recv()).await.unwrap();
        assert_eq!(number, expected);
        guard.release().await.unwrap();
    }
    assert_free(&client, "/mylock").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_session_ends_all_who_wait_in_the_cohort_are_told() {
    let place = place("cohort-session").await;
    let client = place.connect().await;
    let mutex = sharing(&client, 3);
    let held = mutex.lock().await.unwrap();
    let waiting: Vec<_> = (0..8)
        .map(|_| {
            let mutex = mutex.clone();
            tokio::spawn(async move { mutex.lock().await })
        })
        .collect();
    // Two in the entry that is held, and two entries for the other six.
    until_queued(place.admin(), "/mylock", 3).await;
    kill(&client, &place).await;
    for waiter in waiting {
        let outcome = within("the news", waiter).await.unwrap();
        assert!(matches!(outcome, Err(LockError::SessionExpired { .. })), "{outcome:?}");
    }
    let outcome = within("the release", held.release()).await;
    assert!(matches!(outcome, Err(ReleaseError::Lost { .. })), "{outcome:?}");
    assert_free(place.admin(), "/mylock").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn entries_that_nobody_needs_any_more_leave_the_queue() {
    let place = place("cohort-leave").await;
    let client = place.connect().await;
    let mutex = sharing(&client, 2);
    let gate = Mutex::new(place.connect().await, "/mylock").unwrap().lock().await.unwrap();
    let mut waiting: Vec<_> = (0..6)
        .map(|_| {
            let mutex = mutex.clone();
            tokio::spawn(async move { mutex.lock().await.map(drop) })
        })
        .collect();
    until_queued(&client, "/mylock", 1 + 3).await;
    // Two of six: one entry is one too many, whoever opened it.
    waiting.remove(0).abort();
    waiting.remove(2).abort();
    until_queued(&client, "/mylock", 1 + 2).await;
    // One whose time is up finds its entry out of the queue when it is told, for the others need two of three.
    assert!(matches!(mutex.try_lock_for(Duration::from_millis(200)).await, Err(TryLockError::WouldBlock)));
    assert_eq!(children(&client, "/mylock").await.len(), 1 + 2);
    for waiter in &waiting {
        waiter.abort();
    }
    until_queued(&client, "/mylock", 1).await;
    gate.release().await.unwrap();
    assert_free(&client, "/mylock").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_nobody_takes_any_more_goes_to_the_next() {
    let place = place("cohort-cancel").await;
    let client = place.connect().await;
    let mutex = sharing(&client, 1000);
    let inside = Arc::new(AtomicUsize::new(0));
    for round in 0..30 {
        let tasks: Vec<_> = (0..20)
            .map(|_| {
                let (mutex, inside) = (mutex.clone(), inside.clone());
                tokio::spawn(async move {
                    let guard = mutex.lock().await.unwrap();
                    assert_eq!(inside.fetch_add(1, SeqCst), 0);
                    inside.fetch_sub(1, SeqCst);
                    drop(guard);
                })
            })
            .collect();
        // In the middle of their passing it on among each other.
        tokio::time::sleep(Duration::from_micros(100 * round)).await;
        for task in tasks.iter().step_by(2) {
            task.abort();
        }
        for task in tasks.into_iter().skip(1).step_by(2) {
            within("a grant", task).await.unwrap();
        }
    }
    assert_free(&client, "/mylock").await;
}
