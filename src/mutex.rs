//! The mutual-exclusion lock.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::contender::Patience;
use crate::driver::{Lock, NotHeld};
use crate::error::{LockError, PathError, TryLockError};
use crate::guard::MutexGuard;
use crate::name::{Kind, LockPath};
use crate::options::Options;
use crate::session::Session;
use crate::waiter::Waiter;

/// A fair mutual-exclusion lock between all the processes that use the same path of the same ZooKeeper ensemble.
///
/// At most one guard of a path is held at a time, and waiters are served in the order in which the server received
/// them. It is cheap to clone and to keep; clones are the same lock. One `Mutex` can be locked by many tasks at
/// once: each of them queues on its own. It is not re-entrant: a task that locks twice waits for itself.
///
/// # Examples
/// ```no_run
/// use zklock::Mutex;
/// use zklock::zookeeper::Client;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let client = Client::connect("localhost:2181").await?;
/// let mutex = Mutex::new(client, "/mylock")?;
///
/// let guard = mutex.lock().await?;
/// println!("holding with token {}", guard.fencing_token());
/// guard.release().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Mutex {
    lock: Arc<Lock>,
}

impl Mutex {
    /// A lock at `path` with default options. Nothing is sent to the server.
    ///
    /// The path is absolute, below the chroot of the client if that has one. Its node is created when it is needed;
    /// if it exists, it and its data stay as they are.
    ///
    /// # Errors
    /// [`PathError`] if ZooKeeper could not have such a node, or it is the root.
    ///
    /// # Examples
    /// ```no_run
    /// # fn example(client: zklock::zookeeper::Client) -> Result<(), zklock::PathError> {
    /// let mutex = zklock::Mutex::new(&client, "/jobs/nightly/lock")?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn new(session: impl Into<Session>, path: &str) -> Result<Self, PathError> {
        Self::with_options(session, path, Options::default())
    }

    /// A lock at `path` with the given options. Nothing is sent to the server.
    ///
    /// # Errors
    /// [`PathError`] as for [`new`](Self::new), or if an option cannot be used.
    ///
    /// # Examples
    /// ```no_run
    /// # fn example(client: zklock::zookeeper::Client) -> Result<(), zklock::PathError> {
    /// use zklock::{Mutex, Options};
    ///
    /// let mutex = Mutex::with_options(&client, "/mylock", Options::default().label("host-7"))?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_options(session: impl Into<Session>, path: &str, options: Options) -> Result<Self, PathError> {
        options.validate(path)?;
        let lock = Lock::new(session.into(), LockPath::new(path)?, options);
        Ok(Self { lock: Arc::new(lock) })
    }

    /// Waits until the lock is ours.
    ///
    /// While the connection to the server is broken this waits for it, for as long as the session lives. If somebody
    /// deletes the node of this waiter, it queues again, at the end.
    ///
    /// # Errors
    /// [`LockError`] if the session ends or the server refuses what the lock needs.
    ///
    /// # Cancel safety
    /// Dropping the future at any moment leaves the queue; its node is deleted in the background. What is lost is
    /// the place in the queue: a later call starts at the end.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example(mutex: zklock::Mutex) -> Result<(), Box<dyn std::error::Error>> {
    /// let guard = mutex.lock().await?;
    /// // ... work ...
    /// drop(guard); // released in the background
    /// # Ok(())
    /// # }
    /// ```
    pub async fn lock(&self) -> Result<MutexGuard, LockError> {
        match self.lock.acquire(Kind::Exclusive, Patience::Wait, None).await {
            Ok(hold) => Ok(MutexGuard::new(self.lock.clone(), hold)),
            Err(NotHeld::Failed(error)) => Err(error),
            Err(NotHeld::WouldBlock) => unreachable!("a contender without a deadline waits"),
        }
    }

    /// Takes the lock if it is free.
    ///
    /// It first looks at the queue, and writes nothing if somebody is in it. On an ensemble, that look may show a
    /// holder that has released at another server a moment ago. If two try at the same time, at most one of them
    /// gets the lock. While the server cannot be reached this waits for it; [`try_lock_for`](Self::try_lock_for)
    /// bounds that.
    ///
    /// # Errors
    /// [`TryLockError::WouldBlock`] if the lock is held or waited for, else as for [`lock`](Self::lock). In both
    /// cases nothing of the attempt is left in the queue.
    ///
    /// # Cancel safety
    /// As for [`lock`](Self::lock).
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example(mutex: zklock::Mutex) -> Result<(), Box<dyn std::error::Error>> {
    /// use zklock::TryLockError;
    ///
    /// match mutex.try_lock().await {
    ///     Ok(guard) => guard.release().await?,
    ///     Err(TryLockError::WouldBlock) => println!("somebody else is at it"),
    ///     Err(error) => return Err(error.into()),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn try_lock(&self) -> Result<MutexGuard, TryLockError> {
        self.try_acquire(Patience::Try, None).await
    }

    /// Waits for the lock, for the given time at most.
    ///
    /// The time bounds everything, the requests to the server included. When it is up, the entry is taken out of
    /// the queue before this returns. If the server cannot be reached, this returns at once and the entry is removed
    /// in the background; a server that has stopped answering without the connection being seen to break is waited
    /// for half a second longer. A time shorter than the two round trips of a free lock can only fail; one too long
    /// for the clock is no bound.
    ///
    /// # Errors
    /// [`TryLockError::WouldBlock`] once the time is up, else as for [`lock`](Self::lock).
    ///
    /// # Cancel safety
    /// As for [`lock`](Self::lock).
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example(mutex: zklock::Mutex) -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    ///
    /// let guard = mutex.try_lock_for(Duration::from_secs(3)).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn try_lock_for(&self, wait: Duration) -> Result<MutexGuard, TryLockError> {
        self.try_acquire(Patience::Wait, Instant::now().checked_add(wait)).await
    }

    /// The queue as it is now: the holder first, then the waiters in their order. Entries of other libraries too.
    ///
    /// It disturbs nobody, and costs one request for the list and one for each entry. By the time it returns the
    /// queue may have moved on; entries that vanish while it is read are left out.
    ///
    /// # Errors
    /// [`LockError`] if the session ends or the server refuses to show the queue.
    ///
    /// # Cancel safety
    /// It only reads; dropping the future has no effect on the queue.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example(mutex: zklock::Mutex) -> Result<(), Box<dyn std::error::Error>> {
    /// for (position, waiter) in mutex.queue().await?.iter().enumerate() {
    ///     println!("{position}: {} since {:?}", waiter.label, waiter.age);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn queue(&self) -> Result<Vec<Waiter>, LockError> {
        let entries = self.lock.entries().await?;
        Ok(entries.into_iter().map(|(entry, data, stat)| Waiter::new(entry, data, &stat)).collect())
    }

    /// The path of the lock's node.
    pub fn path(&self) -> &str {
        self.lock.path.as_str()
    }

    async fn try_acquire(&self, patience: Patience, deadline: Option<Instant>) -> Result<MutexGuard, TryLockError> {
        match self.lock.acquire(Kind::Exclusive, patience, deadline).await {
            Ok(hold) => Ok(MutexGuard::new(self.lock.clone(), hold)),
            Err(NotHeld::WouldBlock) => Err(TryLockError::WouldBlock),
            Err(NotHeld::Failed(error)) => Err(TryLockError::Lock(error)),
        }
    }
}

impl fmt::Debug for Mutex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mutex").field("path", &self.path()).field("session", &self.lock.session).finish()
    }
}
