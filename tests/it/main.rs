//! The library against a real ZooKeeper: a module per subject, a test per sentence.
//!
//! The tests run in parallel on one server, each in a chroot of its own. `CONTRIBUTING.md` tells how it is found.

mod cancel;
mod cohort;
mod crash;
mod exclusion;
mod guard;
mod herd;
mod matrix;
mod parents;
mod paths;
mod protocol;
mod queue;
mod timeout;
mod try_lock;
mod waste;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};
use zklock::Mutex;
use zklock::zookeeper::{Client, Error};
use zklock_support::{Server, Space};

/// How long anything may take that has to happen some time. Only a fault makes a test wait for so long, and a server
/// that looks for empty containers once a minute, as those do that we did not start.
const PATIENCE: Duration = Duration::from_secs(180);

/// A chroot of its own on the shared server, and the word that no counting test has the server for itself.
struct Place {
    space: Space<'static>,
    _shared: OwnedRwLockReadGuard<()>,
}

impl std::ops::Deref for Place {
    type Target = Space<'static>;

    fn deref(&self) -> &Space<'static> {
        &self.space
    }
}

/// Tests that count what the server does take this for writing, all others for reading.
fn traffic() -> Arc<RwLock<()>> {
    static TRAFFIC: std::sync::OnceLock<Arc<RwLock<()>>> = std::sync::OnceLock::new();
    TRAFFIC.get_or_init(Default::default).clone()
}

async fn place(name: &str) -> Place {
    let shared = traffic().read_owned().await;
    Place { space: Server::shared().await.space(name).await, _shared: shared }
}

/// As [`place`], while no other test is using the server.
async fn quiet_place(name: &str) -> (Space<'static>, OwnedRwLockWriteGuard<()>) {
    let alone = traffic().write_owned().await;
    (Server::shared().await.space(name).await, alone)
}

/// Waits until the condition holds.
async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let wait = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, wait).await.is_ok(), "in vain waited until {what}");
}

/// Fails the test instead of hanging it.
async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("in vain waited for {what}"))
}

async fn children(client: &Client, path: &str) -> Vec<String> {
    let listing = async {
        loop {
            match client.list_children(path).await {
                Err(Error::NoNode) => return Vec::new(),
                // The client gives its connection up when it, or the server, has been held up for some seconds.
                Err(Error::ConnectionLoss | Error::Custom(_)) => {}
                listed => return listed.unwrap(),
            }
        }
    };
    within("a listing", listing).await
}

async fn until_queued(client: &Client, path: &str, count: usize) {
    eventually(&format!("{count} are queued"), async || children(client, path).await.len() == count).await;
}

/// Ends the session of this client, without the client having to do with it.
async fn kill(client: &Client, place: &Place) {
    zklock_support::kill_session(place.server(), client.session_id()).await.unwrap();
}

/// The lock is free: nothing is left in its queue, and it can be had.
async fn assert_free(client: &Client, path: &str) {
    until_queued(client, path, 0).await;
    let mutex = Mutex::new(client, path).unwrap();
    within("a free lock", mutex.lock()).await.unwrap().release().await.unwrap();
}

/// Not a test of the library: `.ci/run` looks at what a failing test leaves behind.
#[tokio::test]
#[ignore = "fails on purpose"]
async fn a_test_that_fails_on_purpose() {
    let place = place("failing").await;
    let guard = Mutex::new(&place.connect().await, "/mylock").unwrap().lock().await.unwrap();
    panic!("as it should, while holding {}", guard.node());
}
