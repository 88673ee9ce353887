//! Guards and runtimes.

use std::time::Duration;

use futures::executor::block_on;
use tokio::runtime::Runtime;
use zklock::zookeeper::{CheckWriteError, Error};
use zklock::{LockError, Mutex, MutexGuard, ReleaseError, Session};

use crate::{assert_free, kill, place, within};

#[tokio::test(flavor = "multi_thread")]
async fn a_guard_dropped_on_a_thread_without_a_runtime_releases() {
    let place = place("thread").await;
    let client = place.connect().await;
    let guard = Mutex::new(&client, "/mylock").unwrap().lock().await.unwrap();
    std::thread::spawn(move || drop(guard)).join().unwrap();
    assert_free(&client, "/mylock").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guard_dropped_in_a_panic_releases() {
    let place = place("panic").await;
    let client = place.connect().await;
    let guard = Mutex::new(&client, "/mylock").unwrap().lock().await.unwrap();
    let panicking = tokio::spawn(async move {
        let _guard = guard;
        panic!("as the test wants it");
    });
    assert!(panicking.await.unwrap_err().is_panic());
    assert_free(&client, "/mylock").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_can_be_used_from_any_executor_once_its_session_has_a_runtime() {
    let place = place("executor").await;
    let client = place.connect().await;
    let mutex = Mutex::new(&client, "/mylock").unwrap();
    let on_a_thread = std::thread::spawn(move || {
        block_on(async {
            let guard = mutex.lock().await.unwrap();
            assert_eq!(mutex.queue().await.unwrap().len(), 1);
            assert!(mutex.try_lock_for(Duration::from_millis(50)).await.is_err());
            guard.release().await.unwrap();
        });
    });
    within("the thread", tokio::task::spawn_blocking(move || on_a_thread.join().unwrap())).await.unwrap();
    assert_free(&client, "/mylock").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_any_runtime_there_is_an_error_and_no_panic() {
    let place = place("no-runtime").await;
    let client = place.connect().await;
    std::thread::spawn(move || {
        let mutex = Mutex::new(Session::from(client), "/mylock").unwrap();
        let path = "/mylock".to_owned();
        assert_eq!(block_on(mutex.lock()).unwrap_err(), LockError::NoRuntime { path: path.clone() });
        assert_eq!(block_on(mutex.queue()).unwrap_err(), LockError::NoRuntime { path });
        assert!(block_on(mutex.try_lock_for(Duration::from_secs(1))).is_err());
    })
    .join()
    .unwrap();
}

#[test]
fn guards_and_futures_outlive_their_runtime_without_a_panic() {
    let runtime = Runtime::new().unwrap();
    let (place, guards, mutex) = runtime.block_on(async {
        let place = place("outlive").await;
        let client = place.connect().await;
        let mut guards = Vec::new();
        for i in 0..3 {
            guards.push(Mutex::new(&client, &format!("/lock-{i}")).unwrap().lock().await.unwrap());
        }
        (place, guards, Mutex::new(&client, "/lock-0").unwrap())
    });
    let mut waiting = Box::pin(mutex.lock());
    runtime.block_on(async { assert!(futures::poll!(&mut waiting).is_pending()) });
    runtime.shutdown_timeout(Duration::from_secs(10));
    assert!(matches!(block_on(waiting).unwrap_err(), LockError::RuntimeShutdown { .. }));
    let mut guards = guards.into_iter();
    drop(guards.next());
    let outcome = block_on(guards.next().unwrap().release());
    assert!(matches!(outcome, Err(ReleaseError::RuntimeShutdown { .. })), "{outcome:?}");
    std::thread::spawn(move || drop(guards)).join().unwrap();
    drop((mutex, place));
}

/// The client lives on one runtime, the tasks of the lock on another, which is shut down.
#[tokio::test(flavor = "multi_thread")]
async fn nodes_go_when_the_runtime_of_the_lock_is_shut_down_and_the_client_lives_on() {
    let place = place("two-runtimes").await;
    let client = place.connect().await;
    let theirs = client.clone();
    let held = tokio::task::spawn_blocking(move || {
        let runtime = Runtime::new().unwrap();
        let guard = runtime.block_on(async { Mutex::new(&theirs, "/mylock").unwrap().lock().await.unwrap() });
        runtime.shutdown_timeout(Duration::from_secs(10));
        guard
    });
    let guard = within("the other runtime", held).await.unwrap();
    assert_free(&client, "/mylock").await;
    drop(guard);
    assert_free(&client, "/mylock").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_check_writer_commits_while_held_and_not_after() {
    let place = place("check").await;
    let (client, other) = (place.connect().await, place.connect().await);
    let mode = zklock::zookeeper::CreateMode::Persistent.with_acls(zklock::zookeeper::Acls::anyone_all());
    other.create("/data", b"0", &mode).await.unwrap();
    let guard = Mutex::new(&client, "/mylock").unwrap().lock().await.unwrap();
    let mut writer = guard.check_writer().unwrap();
    writer.add_set_data("/data", b"1", None).unwrap();
    writer.commit().await.unwrap();
    other.delete(guard.node(), None).await.unwrap();
    let mut writer = guard.check_writer().unwrap();
    writer.add_set_data("/data", b"2", None).unwrap();
    assert_eq!(writer.commit().await.unwrap_err(), CheckWriteError::CheckFailed { source: Error::NoNode });
    assert_eq!(other.get_data("/data").await.unwrap().0, b"1");
    let node = guard.node().to_owned();
    assert_eq!(guard.release().await, Err(ReleaseError::Lost { node }));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guard_whose_session_is_over_can_be_dropped_and_released() {
    let place = place("session-over").await;
    let (client, other) = (place.connect().await, place.connect().await);
    let one = Mutex::new(&client, "/one").unwrap().lock().await.unwrap();
    let two = Mutex::new(&client, "/two").unwrap().lock().await.unwrap();
    kill(&client, &place).await;
    assert_free(&other, "/one").await;
    drop(one);
    let node = two.node().to_owned();
    assert_eq!(within("the release", two.release()).await, Err(ReleaseError::Lost { node }));
}

#[test]
fn the_types_can_be_sent_shared_and_kept() {
    fn is_free<T: Send + Sync + 'static>() {}
    fn is_sendable(_: impl Send) {}
    is_free::<Mutex>();
    is_free::<MutexGuard>();
    is_free::<Session>();
    is_free::<LockError>();
    #[allow(dead_code)]
    fn futures(mutex: &Mutex, guard: MutexGuard) {
        is_sendable(mutex.lock());
        is_sendable(mutex.try_lock());
        is_sendable(mutex.try_lock_for(Duration::ZERO));
        is_sendable(mutex.queue());
        is_sendable(guard.release());
    }
}
