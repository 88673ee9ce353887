//! A chroot of its own for each test, so that tests of one server run in parallel.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt, join_all};
use tokio::time::{sleep, timeout};
use zookeeper_client::{Acls, Client, CreateMode, Error};

use crate::background::{lock, runtime};
use crate::supervisor::clear_away_at_the_end;
use crate::{Proxy, Server};

/// A test's own part of a server: a chroot, removed with all that is in it when this is dropped.
pub struct Space<'a> {
    server: &'a Server,
    path: String,
    admin: Client,
}

impl<'a> Space<'a> {
    /// Where it is on the server, `/zklock-it/<name>-<unique>`.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// How to connect to it, `host:port/chroot`.
    pub fn connect_string(&self) -> String {
        self.server.connect_string_of(&self.path)
    }

    /// How to connect to it through a proxy.
    pub fn connect_string_through(&self, proxy: &Proxy) -> String {
        self.server.connect_string_through(proxy.addr(), &self.path)
    }

    /// A new session of 10 s in the chroot.
    ///
    /// # Panics
    ///
    /// If the server does not let us.
    pub async fn connect(&self) -> Client {
        self.connect_with(SESSION).await
    }

    /// A new session in the chroot, with this time-out. The server grants no less than one second.
    ///
    /// # Panics
    ///
    /// If the server does not let us.
    pub async fn connect_with(&self, session_timeout: Duration) -> Client {
        connect(&self.connect_string(), session_timeout).await
    }

    /// A new session in the chroot through a proxy.
    ///
    /// # Panics
    ///
    /// If the server or the proxy does not let us.
    pub async fn connect_through(&self, proxy: &Proxy, session_timeout: Duration) -> Client {
        connect(&self.connect_string_through(proxy), session_timeout).await
    }

    /// The server it is on.
    pub fn server(&self) -> &'a Server {
        self.server
    }

    /// A session in the chroot for looking at what the test did, apart from the test's own.
    pub fn admin(&self) -> &Client {
        &self.admin
    }

    pub(crate) async fn make(server: &'a Server, name: &str) -> Space<'a> {
        let path = format!("{PARENT}/{name}-{}", unique());
        let client = connect(server.connect_string(), SESSION).await;
        if server.is_given() {
            // Before it exists, so that it cannot be forgotten.
            clear_away_at_the_end();
            lock(&LEFT).insert((server.connect_string().to_owned(), path.clone()));
        }
        let options = CreateMode::Persistent.with_acls(Acls::anyone_all());
        let mut made = client.mkdir(&path, &options).await;
        for _ in 0..10 {
            // Another process found the parent empty and removed it.
            if let Err(Error::NoNode) = made {
                made = client.mkdir(&path, &options).await;
            }
        }
        made.unwrap_or_else(|error| panic!("cannot make {path}: {error}"));
        let admin = client.chroot(path.clone()).unwrap_or_else(|_| panic!("{path} is no chroot"));
        Space { server, path, admin }
    }
}

impl Drop for Space<'_> {
    fn drop(&mut self) {
        runtime().spawn(remove(self.server.connect_string().to_owned(), self.path.clone()));
    }
}

impl std::fmt::Debug for Space<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Space({})", self.connect_string())
    }
}

const PARENT: &str = "/zklock-it";
const SESSION: Duration = Duration::from_secs(10);

/// What is still to be removed from servers that live on after us: connect string and path.
static LEFT: Mutex<BTreeSet<(String, String)>> = Mutex::new(BTreeSet::new());

/// Removes what is left, and waits for it. For the end of the process.
pub(crate) fn remove_all() {
    // Held through the removal, or the second of two callers would not wait for the first.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _one = lock(&ONE_AT_A_TIME);
    let left = std::mem::take(&mut *lock(&LEFT));
    if left.is_empty() {
        return;
    }
    let removals = join_all(left.into_iter().map(|(connect_string, path)| remove(connect_string, path)));
    let removed = runtime().spawn(async { timeout(Duration::from_secs(10), removals).await });
    while !removed.is_finished() {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Best effort: what cannot be removed now is left to whoever owns the server.
async fn remove(connect_string: String, path: String) {
    let connector = Client::connector().with_session_timeout(SESSION).with_fail_eagerly();
    if let Ok(client) = connector.connect(&connect_string).await {
        // Clients of the test that still live may add nodes.
        for _ in 0..5 {
            match remove_tree(&client, path.clone()).await {
                Ok(()) | Err(Error::NoNode) => break,
                Err(_) => sleep(Duration::from_millis(200)).await,
            }
        }
        // The parent goes with the last; NotEmpty says that it was not.
        let _ = client.delete(PARENT, None).await;
    }
    lock(&LEFT).remove(&(connect_string, path));
}

fn remove_tree(client: &Client, path: String) -> BoxFuture<'_, Result<(), Error>> {
    async move {
        let children = client.list_children(&path).await?;
        // Many at a time, as a queue of thousands may be left.
        for some in children.chunks(500) {
            let removals = some.iter().map(|child| remove_one(client, format!("{path}/{child}")));
            for removed in join_all(removals).await {
                removed?;
            }
        }
        match client.delete(&path, None).await {
            Err(Error::NoNode) => Ok(()),
            result => result,
        }
    }
    .boxed()
}

/// Most nodes have no children: try that first.
fn remove_one(client: &Client, path: String) -> BoxFuture<'_, Result<(), Error>> {
    let delete = client.delete(&path, None);
    async move {
        match delete.await {
            Err(Error::NotEmpty) => remove_tree(client, path).await,
            Err(Error::NoNode) => Ok(()),
            result => result,
        }
    }
    .boxed()
}

async fn connect(connect_string: &str, session_timeout: Duration) -> Client {
    let connected = Client::connector().with_session_timeout(session_timeout).connect(connect_string).await;
    connected.unwrap_or_else(|error| panic!("cannot connect to {connect_string}: {error}"))
}

fn unique() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    format!("{:x}-{:x}-{}", now.as_micros(), std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_space_is_a_chroot_of_its_own_and_goes_when_dropped() {
        let server = Server::shared().await;
        let (space, other) = (server.space("space").await, server.space("space").await);
        assert_ne!(space.path(), other.path());
        let options = CreateMode::Persistent.with_acls(Acls::anyone_all());
        space.connect().await.mkdir("/deep/deeper", &options).await.unwrap();
        assert!(space.admin().check_stat("/deep/deeper").await.unwrap().is_some());
        assert!(other.admin().check_stat("/deep").await.unwrap().is_none());

        let path = space.path().to_owned();
        drop(space);

        let root = connect(server.connect_string(), SESSION).await;
        let gone = async {
            while root.check_stat(&path).await.unwrap().is_some() {
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(Duration::from_secs(10), gone).await.expect("the space is removed");
    }
}
