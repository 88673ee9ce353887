//! What a holder has.

use std::fmt;
use std::sync::Arc;

use crate::driver::{Hold, Lock};
use crate::error::ReleaseError;
use crate::zookeeper::{CheckWriter, Error};

/// A number that rises from each holder of a lock to the next: the transaction that put the holder's node into the
/// queue.
///
/// Send it along with every write to whatever the lock protects, and let that refuse a token that is smaller than
/// one it has seen: then a holder that was stopped for so long that it lost the lock can do no harm when it goes
/// on. Tokens rise for as long as the ZooKeeper ensemble keeps its data, also when the lock's node is deleted and
/// created again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FencingToken(u64);

impl FencingToken {
    pub(crate) fn new(czxid: i64) -> Self {
        Self(czxid.unsigned_abs())
    }

    /// The number itself, to store or to send.
    pub fn as_u64(self) -> u64 {
        self.0
    }
}

impl From<FencingToken> for u64 {
    fn from(token: FencingToken) -> Self {
        token.0
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The right of the holder of a [`Mutex`](crate::Mutex).
///
/// Dropping it releases the lock in the background, from any thread, inside a runtime or out of one. To know how the
/// release went, use [`release`](Self::release).
///
/// The right is a lease: it ends with the ZooKeeper session, also if this process does not notice at once. See
/// [the limits of the guarantee](crate#what-is-not-guaranteed).
#[must_use = "the lock is released as soon as its guard is dropped"]
pub struct MutexGuard {
    lock: Arc<Lock>,
    hold: Hold,
    path: String,
}

impl MutexGuard {
    pub(crate) fn new(lock: Arc<Lock>, hold: Hold) -> Self {
        let path = lock.path.child(&hold.node.name);
        Self { lock, hold, path }
    }

    /// The token to fence writes with. It is greater than that of every earlier holder of this lock.
    pub fn fencing_token(&self) -> FencingToken {
        FencingToken::new(self.hold.node.czxid)
    }

    /// The path of the holder's node, as the client of the lock's session sees it.
    pub fn node(&self) -> &str {
        &self.path
    }

    /// Starts a set of writes to ZooKeeper that are committed together, and only while this guard's node exists.
    ///
    /// # Errors
    /// A commit fails with [`CheckWriteError::CheckFailed`](crate::zookeeper::CheckWriteError) if the lock was lost;
    /// then nothing was written.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example(guard: zklock::MutexGuard) -> Result<(), Box<dyn std::error::Error>> {
    /// let mut writer = guard.check_writer()?;
    /// writer.add_set_data("/config", b"new", None)?;
    /// writer.commit().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn check_writer(&self) -> Result<CheckWriter<'_>, Error> {
        self.lock.session.client().new_check_writer(&self.path, None)
    }

    /// Releases the lock and waits until the server has confirmed it.
    ///
    /// While the server cannot be reached this waits, and tries again, until the session is over.
    ///
    /// # Errors
    /// - [`ReleaseError::Lost`] if the lock was not held any more.
    /// - [`ReleaseError::Refused`] if the server does not allow to delete the node.
    /// - [`ReleaseError::RuntimeShutdown`] if the runtime of the session is gone.
    ///
    /// # Cancel safety
    /// Once called, the release goes on in the background when the future is dropped; only its outcome is not
    /// learnt. A future that was never polled releases like a dropped guard.
    ///
    /// # Examples
    /// ```no_run
    /// # async fn example(mutex: zklock::Mutex) -> Result<(), Box<dyn std::error::Error>> {
    /// let guard = mutex.lock().await?;
    /// // ... work ...
    /// guard.release().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn release(self) -> Result<(), ReleaseError> {
        self.lock.release(self.hold).await
    }
}

impl fmt::Debug for MutexGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MutexGuard")
            .field("node", &self.path)
            .field("fencing_token", &self.fencing_token())
            .finish_non_exhaustive()
    }
}
