//! What the contenders of one session share: they need no server to tell each other.
//!
//! Contenders of one session at one lock know of each other, so that a hand-off between them takes no watch, one
//! listing serves all that can use it, and the paths that the session watches stay few, however many wait: the client
//! loses its session at the first reconnect that has to restore watches on more than 128 KiB of paths.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use futures::FutureExt;
use futures::future::{BoxFuture, Shared, WeakShared};
use tokio::sync::{Notify, watch};

use crate::cohort::Cohort;
use crate::contender::Node;
use crate::name::Entry;
use crate::queue::Queue;
use crate::zookeeper::{Client, Error};

/// The paths that a session watches for waiters who are not the first of their session at their lock.
const WATCHED_BYTES: usize = 48 * 1024;

/// All locks that are used in one session.
#[derive(Debug, Default)]
pub struct SessionLocks {
    locks: Mutex<HashMap<String, Weak<LocalQueue>>>,
    watched_bytes: Arc<AtomicUsize>,
}

impl SessionLocks {
    /// Those of the client's session, shared by all clones of the client.
    pub fn of(client: &Client) -> Arc<Self> {
        static SESSIONS: OnceLock<Mutex<HashMap<i64, Weak<SessionLocks>>>> = OnceLock::new();
        let mut sessions = locked(SESSIONS.get_or_init(Mutex::default));
        let id = client.session_id().0;
        if let Some(locks) = sessions.get(&id).and_then(Weak::upgrade) {
            return locks;
        }
        sessions.retain(|_, session| session.strong_count() > 0);
        let locks = Arc::new(Self::default());
        sessions.insert(id, Arc::downgrade(&locks));
        locks
    }

    /// The queue of the session at the lock with this path, seen from the root.
    pub fn at(self: &Arc<Self>, path: String) -> Arc<LocalQueue> {
        let mut locks = locked(&self.locks);
        if let Some(queue) = locks.get(&path).and_then(Weak::upgrade) {
            return queue;
        }
        let queue = Arc::new(LocalQueue {
            session: self.clone(),
            path: path.clone(),
            parent: Mutex::new(Parent::Unknown),
            contenders: Mutex::default(),
            cohort: Arc::default(),
            listing: Mutex::new(None),
        });
        locks.insert(path, Arc::downgrade(&queue));
        queue
    }
}

/// The contenders of one session at one lock.
#[derive(Debug)]
pub struct LocalQueue {
    session: Arc<SessionLocks>,
    path: String,
    parent: Mutex<Parent>,
    contenders: Mutex<BTreeMap<(i64, String), Member>>,
    cohort: Arc<Cohort>,
    listing: Mutex<Option<Listing>>,
}

/// A contender, as the others of its session see it.
#[derive(Debug)]
struct Member {
    stage: watch::Sender<Stage>,
    /// Somebody waits for it.
    followed: Arc<Notify>,
}

impl Member {
    fn follow(&self) -> watch::Receiver<Stage> {
        self.followed.notify_one();
        self.stage.subscribe()
    }
}

/// What is known of the lock's own node, and so how a node is put into the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parent {
    Unknown,
    /// It carried our mark in this version of its data. Writing the mark again on that condition changes nobody's
    /// data, and its answer tells how many children there are.
    Ours {
        version: i32,
    },
    /// Others are at it, so the version is not known, and its answer would say that we have to wait.
    Contended,
    /// It holds data of somebody else, or may not be written to.
    Foreign,
}

/// How far a contender has come, as the others of its session are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Waiting,
    Holding,
    /// It held, and its node is gone.
    Passed,
    /// It ended otherwise.
    Left,
}

impl LocalQueue {
    /// Those who share their entries.
    pub fn cohort(&self) -> &Arc<Cohort> {
        &self.cohort
    }

    pub fn parent(&self) -> Parent {
        *locked(&self.parent)
    }

    pub fn set_parent(&self, parent: Parent) {
        *locked(&self.parent) = parent;
    }

    /// The version to write on condition of. Whoever takes it changes it, so nobody else can use it until it is known
    /// again.
    pub fn take_version(&self) -> Option<i32> {
        let mut parent = locked(&self.parent);
        match *parent {
            Parent::Ours { version } => {
                *parent = Parent::Contended;
                Some(version)
            }
            Parent::Unknown | Parent::Contended | Parent::Foreign => None,
        }
    }

    /// Somebody was before us: more will be, so it is not worth asking for the only place in the queue.
    pub fn is_contended(&self) {
        let mut parent = locked(&self.parent);
        if matches!(*parent, Parent::Ours { .. }) {
            *parent = Parent::Contended;
        }
    }

    /// Nobody was before us, so it may be worth asking again.
    pub fn is_free_again(&self) {
        let mut parent = locked(&self.parent);
        if *parent == Parent::Contended {
            *parent = Parent::Unknown;
        }
    }

    /// Lets the others of the session know of a node.
    pub fn enter(self: &Arc<Self>, node: &Node) -> Place {
        let key = key(&node.name);
        let (stage, _) = watch::channel(Stage::Waiting);
        let followed = Arc::new(Notify::new());
        locked(&self.contenders).insert(key.clone(), Member { stage, followed: followed.clone() });
        Place { queue: self.clone(), key, followed }
    }

    /// The contender of our session with this node, to be told of.
    pub fn stage_of(&self, name: &str) -> Option<watch::Receiver<Stage>> {
        locked(&self.contenders).get(&key(name)).map(Member::follow)
    }

    /// If the session watches enough already: the nearest contender of our session before this node. The first of them
    /// never gets one, so somebody always watches.
    pub fn stage_before(&self, name: &str) -> Option<watch::Receiver<Stage>> {
        if self.session.watched_bytes.load(Ordering::Relaxed) < WATCHED_BYTES {
            return None;
        }
        let contenders = locked(&self.contenders);
        contenders.range(..key(name)).next_back().map(|(_, member)| member.follow())
    }

    /// Counts a path as watched until the result is dropped.
    pub fn watching(&self, path: &str) -> Watching {
        self.session.watched_bytes.fetch_add(path.len(), Ordering::Relaxed);
        Watching { watched_bytes: self.session.watched_bytes.clone(), bytes: path.len() }
    }

    /// A listing that is asked for after this call. All who call before it is asked for share it.
    pub fn listing(&self, ask: impl FnOnce() -> BoxFuture<'static, Result<Arc<Queue>, Error>>) -> Listed {
        let mut last = locked(&self.listing);
        let before = last.as_ref().and_then(|listing| listing.answer.upgrade());
        if let (Some(listing), Some(answer)) = (&*last, &before)
            && !listing.is_asked.load(Ordering::Acquire)
        {
            return answer.clone();
        }
        let is_asked = Arc::new(AtomicBool::new(false));
        let (asked, answer) = (is_asked.clone(), ask());
        let answer = async move {
            if let Some(before) = before {
                let _ = before.await;
            }
            asked.store(true, Ordering::Release);
            answer.await
        };
        let answer = answer.boxed().shared();
        *last = answer.downgrade().map(|answer| Listing { is_asked, answer });
        answer
    }
}

impl Drop for LocalQueue {
    fn drop(&mut self) {
        let mut locks = locked(&self.session.locks);
        if locks.get(&self.path).is_some_and(|queue| queue.strong_count() == 0) {
            locks.remove(&self.path);
        }
    }
}

pub type Listed = Shared<BoxFuture<'static, Result<Arc<Queue>, Error>>>;

#[derive(Debug)]
struct Listing {
    /// From then on it may be too old for those who come.
    is_asked: Arc<AtomicBool>,
    /// Owned by those who wait for it: it holds on to the lock, and so to the client.
    answer: WeakShared<BoxFuture<'static, Result<Arc<Queue>, Error>>>,
}

/// The place of a contender in the queue of its session. Dropping it says that it left.
#[derive(Debug)]
pub struct Place {
    queue: Arc<LocalQueue>,
    key: (i64, String),
    followed: Arc<Notify>,
}

impl Place {
    pub fn is_holding(&self) {
        if let Some(member) = locked(&self.queue.contenders).get(&self.key) {
            member.stage.send_replace(Stage::Holding);
        }
    }

    /// Resolves once somebody of the session waits for this one.
    pub async fn followed(&self) {
        self.followed.notified().await;
    }

    /// By which others, who are no contenders, say that they rely on this one.
    pub fn to_follow(&self) -> Arc<Notify> {
        self.followed.clone()
    }

    pub fn has_passed(self) {
        self.end(Stage::Passed);
    }

    fn end(&self, last: Stage) {
        let member = locked(&self.queue.contenders).remove(&self.key);
        if let Some(member) = member {
            member.stage.send_replace(last);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.end(Stage::Left);
    }
}

/// A path that counts as watched.
#[derive(Debug)]
pub struct Watching {
    watched_bytes: Arc<AtomicUsize>,
    bytes: usize,
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.watched_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

fn key(name: &str) -> (i64, String) {
    (Entry::parse(name).map_or(i64::MAX, |entry| entry.sequence), name.to_owned())
}

/// For locks under which nothing can be left half done.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
