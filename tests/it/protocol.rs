//! What the protocol asks of the server, and what it keeps its hands off.

use std::time::{Duration, Instant};

use zklock::{Mutex, Naming, Options, Parents};
use zklock_support::Proxy;

use crate::{assert_free, children, eventually, place, quiet_place, until_queued, within};

#[tokio::test(flavor = "multi_thread")]
async fn a_free_lock_takes_one_request_and_its_release_another() {
    let (space, _alone) = quiet_place("requests").await;
    let client = space.connect_with(Duration::from_secs(40)).await;
    let mutex = Mutex::new(&client, "/mylock").unwrap();
    // The first finds out what the lock's node is; more often than the server takes it away as an empty container.
    mutex.lock().await.unwrap().release().await.unwrap();
    let server = space.server();
    // What earlier tests left to be removed is removed by now when a reading counts nothing but itself.
    let mut before = server.mntr().await.unwrap();
    eventually("the server is quiet", async || {
        let earlier = std::mem::replace(&mut before, server.mntr().await.unwrap());
        before.since(&earlier).packets_received() <= 1
    })
    .await;
    const CYCLES: u64 = 50;
    for _ in 0..CYCLES {
        mutex.lock().await.unwrap().release().await.unwrap();
    }
    let packets = server.mntr().await.unwrap().since(&before).packets_received();
    // Some for pings and the reading, and for making the lock's node anew if the server took it in the middle; with
    // one more request a cycle it would be half as many again.
    assert!(packets <= 2 * CYCLES + 20, "{packets} packets for {CYCLES} cycles");
    assert_eq!(server.mntr().await.unwrap().watch_count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mark_that_somebody_replaced_is_respected_at_once() {
    let place = place("replaced").await;
    let (client, other) = (place.connect().await, place.connect().await);
    let options = Options::default().parents(Parents::Persistent);
    let mutex = Mutex::with_options(&client, "/mylock", options).unwrap();
    for round in 0..3 {
        // The last of these takes one request, on condition that the node still carries the library's mark.
        for _ in 0..3 {
            mutex.lock().await.unwrap().release().await.unwrap();
        }
        let theirs = format!("theirs {round}").into_bytes();
        other.set_data("/mylock", &theirs, None).await.unwrap();
        for _ in 0..3 {
            let guard = mutex.lock().await.unwrap();
            assert!(mutex.try_lock().await.is_err());
            guard.release().await.unwrap();
            assert_eq!(other.get_data("/mylock").await.unwrap().0, theirs, "round {round}");
        }
        let mark = b"zklock/1 mutex";
        other.set_data("/mylock", mark, None).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_take_turns_at_a_free_lock_never_hold_it_both() {
    let place = place("turns").await;
    let clients = [place.connect().await, place.connect().await, place.connect().await];
    let mutexes = clients.each_ref().map(|client| Mutex::new(client, "/mylock").unwrap());
    let mut last = None;
    for turn in 0..60 {
        let guard = within("a free lock", mutexes[turn * turn % 3].lock()).await.unwrap();
        assert!(Some(guard.fencing_token()) > last);
        assert!(mutexes[(turn + 1) % 3].try_lock().await.is_err());
        last = Some(guard.fencing_token());
        guard.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn contenders_of_one_session_pass_the_lock_on_without_watches_on_each_other() {
    let (space, _alone) = quiet_place("local").await;
    let client = space.connect().await;
    let mutex = Mutex::new(&client, "/mylock").unwrap();
    let gate = mutex.lock().await.unwrap();
    let queued: Vec<_> = (0..100)
        .map(|_| {
            let mutex = mutex.clone();
            tokio::spawn(async move { mutex.lock().await.unwrap().release().await.unwrap() })
        })
        .collect();
    until_queued(&client, "/mylock", 101).await;
    let server = space.server();
    // The holder and the next one watch their own nodes; that is all.
    eventually("they have settled", async || server.mntr().await.unwrap().watch_count() == 2).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(server.mntr().await.unwrap().watch_count(), 2);
    gate.release().await.unwrap();
    for waiter in queued {
        within("a grant", waiter).await.unwrap();
    }
    assert_eq!(server.mntr().await.unwrap().watch_count(), 0);
    assert_free(&client, "/mylock").await;
}

/// The paths of so many watches would end the session at its reconnect.
#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_waiters_of_two_sessions_survive_a_reconnect() {
    let place = place("thousands").await;
    let admin = place.connect().await;
    let gate = Mutex::new(&admin, "/mylock").unwrap().lock().await.unwrap();
    let proxy = Proxy::start(place.server().connect_string()).await;
    let clients = [
        place.connect_through(&proxy, Duration::from_secs(30)).await,
        place.connect_through(&proxy, Duration::from_secs(30)).await,
    ];
    const WAITERS: usize = 3000;
    // One of each session in turn, so that nobody's predecessor is of the same session.
    let mutexes = clients.each_ref().map(|client| Mutex::new(client, "/mylock").unwrap());
    let queued: Vec<_> = (0..WAITERS)
        .map(|i| {
            let mutex = mutexes[i % 2].clone();
            tokio::spawn(async move { mutex.lock().await.unwrap().release().await.unwrap() })
        })
        .collect();
    until_queued(&admin, "/mylock", 1 + WAITERS).await;
    proxy.cut();
    proxy.restore();
    gate.release().await.unwrap();
    for waiter in queued {
        within("a grant", waiter).await.unwrap();
    }
    assert_eq!(children(&admin, "/mylock").await.len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_waiters_of_one_session_are_served_in_order_although_its_connection_breaks() {
    const WAITERS: usize = 10_000;
    let place = place("ten-thousand").await;
    // So much at once holds up a slow machine for some seconds, in which the connection of a shorter session would be
    // given up.
    let session_timeout = Duration::from_secs(60);
    let admin = place.connect_with(session_timeout).await;
    let gate = Mutex::new(&admin, "/mylock").unwrap().lock().await.unwrap();
    let proxy = Proxy::start(place.server().connect_string()).await;
    let client = place.connect_through(&proxy, session_timeout).await;
    let mutex = Mutex::new(&client, "/mylock").unwrap();
    let start = Instant::now();
    let (granted, mut grants) = tokio::sync::mpsc::unbounded_channel();
    let queued: Vec<_> = (0..WAITERS)
        .map(|_| {
            let (mutex, granted) = (mutex.clone(), granted.clone());
            tokio::spawn(async move {
                let guard = mutex.lock().await.unwrap();
                granted.send(guard.node().rsplit_once('/').unwrap().1.to_owned()).unwrap();
                guard.release().await.unwrap();
            })
        })
        .collect();
    drop(granted);
    eventually("all are queued", async || {
        let stat = admin.check_stat("/mylock").await.unwrap();
        stat.is_some_and(|stat| stat.num_children as usize == 1 + WAITERS)
    })
    .await;
    let mut expected = children(&admin, "/mylock").await;
    expected.sort_by_key(|name| name.rsplit_once('-').unwrap().1.to_owned());
    // After this one all creates have been answered too.
    within("an answer", client.check_stat("/mylock")).await.unwrap();
    println!("queued after {:?}", start.elapsed());

    // Once while all of them wait, and once in the middle of the hand-overs.
    proxy.cut();
    proxy.restore();
    eventually("the connection is back", async || proxy.traffic().connections > 1).await;
    let connections = proxy.traffic().connections;
    eventually("it answers", async || client.check_stat("/mylock").await.is_ok()).await;
    gate.release().await.unwrap();
    let mut served = Vec::new();
    while let Some(name) = within("a grant", grants.recv()).await {
        served.push(name);
        if served.len() == WAITERS / 2 {
            proxy.cut();
            proxy.restore();
        }
    }
    println!("served after {:?}", start.elapsed());
    assert!(proxy.traffic().connections > connections, "the second break was none");
    assert!(served == expected[1..], "somebody was lost, served twice or overtaken");
    for waiter in queued {
        within("an end", waiter).await.unwrap();
    }
    assert_eq!(children(&admin, "/mylock").await.len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_whose_node_is_deleted_does_not_hold_up_a_waiter_of_its_own_session() {
    let place = place("own-deleted").await;
    let client = place.connect().await;
    let mutex = Mutex::new(&client, "/mylock").unwrap();
    let guard = mutex.lock().await.unwrap();
    let waiting = tokio::spawn({
        let mutex = mutex.clone();
        async move { mutex.lock().await }
    });
    until_queued(&client, "/mylock", 2).await;
    client.delete(guard.node(), None).await.unwrap();
    let next = within("the next", waiting).await.unwrap().unwrap();
    let node = guard.node().to_owned();
    assert_eq!(guard.release().await, Err(zklock::ReleaseError::Lost { node }));
    next.release().await.unwrap();
    assert_free(&client, "/mylock").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_whose_answer_was_lost_is_found_and_adopted() {
    let place = place("lost-answer").await;
    let admin = place.connect().await;
    for naming in [Naming::Tagged, Naming::Compact] {
        let path = format!("/{naming:?}");
        let proxy = Proxy::start(place.server().connect_string()).await;
        let client = place.connect_through(&proxy, Duration::from_secs(20)).await;
        let options = Options::default().naming(naming).label("the one").parents(Parents::Persistent);
        let mutex = Mutex::with_options(&client, &path, options).unwrap();
        mutex.lock().await.unwrap().release().await.unwrap();
        proxy.silence_answers();
        let locking = tokio::spawn({
            let mutex = mutex.clone();
            async move { mutex.lock().await }
        });
        until_queued(&admin, &path, 1).await;
        // The server has created it, and the client will never hear of it.
        proxy.restore();
        let guard = within("the adoption", locking).await.unwrap().unwrap();
        let queue = mutex.queue().await.unwrap();
        assert_eq!(queue.len(), 1, "{naming:?}");
        assert_eq!(queue[0].token, guard.fencing_token());
        assert_eq!(queue[0].label, "the one");
        guard.release().await.unwrap();
        assert_free(&admin, &path).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_whose_answer_was_lost_is_a_release() {
    let place = place("lost-release").await;
    let admin = place.connect().await;
    let proxy = Proxy::start(place.server().connect_string()).await;
    let client = place.connect_through(&proxy, Duration::from_secs(20)).await;
    let guard = Mutex::new(&client, "/mylock").unwrap().lock().await.unwrap();
    proxy.silence_answers();
    let releasing = tokio::spawn(guard.release());
    until_queued(&admin, "/mylock", 0).await;
    proxy.restore();
    assert_eq!(within("the release", releasing).await.unwrap(), Ok(()));
    assert_free(&admin, "/mylock").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn compact_names_keep_the_order_and_ask_for_no_list() {
    let place = place("compact").await;
    let clients = [place.connect().await, place.connect().await, place.connect().await];
    let compact = || Options::default().naming(Naming::Compact);
    let mutexes = clients.each_ref().map(|client| Mutex::with_options(client, "/mylock", compact()).unwrap());
    let gate = mutexes[0].lock().await.unwrap();
    assert!(gate.node().ends_with("/mylock/lock-0000000000"), "{}", gate.node());
    let (granted, mut grants) = tokio::sync::mpsc::unbounded_channel();
    for position in 1..=30 {
        let (mutex, granted) = (mutexes[position % 3].clone(), granted.clone());
        tokio::spawn(async move {
            let guard = mutex.lock().await.unwrap();
            granted.send(position).unwrap();
            guard.release().await.unwrap();
        });
        until_queued(&clients[0], "/mylock", 1 + position).await;
    }
    gate.release().await.unwrap();
    for position in 1..=30 {
        assert_eq!(within("a grant", grants.recv()).await, Some(position));
    }
    assert_free(&clients[0], "/mylock").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn compact_and_tagged_names_stand_in_one_queue() {
    let place = place("mixed-names").await;
    let client = place.connect().await;
    let mutexes: Vec<_> = [Naming::Compact, Naming::Tagged]
        .map(|naming| Mutex::with_options(&client, "/mylock", Options::default().naming(naming)).unwrap())
        .into();
    let inside = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let workers: Vec<_> = (0..16)
        .map(|i| {
            let (mutex, inside) = (mutexes[i % 2].clone(), inside.clone());
            tokio::spawn(async move {
                for _ in 0..5 {
                    let guard = mutex.lock().await.unwrap();
                    assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                    tokio::task::yield_now().await;
                    inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                    guard.release().await.unwrap();
                }
            })
        })
        .collect();
    for worker in workers {
        within("a worker", worker).await.unwrap();
    }
    assert_free(&client, "/mylock").await;
}
