//! What an observer sees of a queue.

use std::time::{Duration, SystemTime};

use crate::guard::FencingToken;
use crate::name::{Entry, label};
use crate::zookeeper::{SessionId, Stat};

/// One entry of a lock's queue, as it was when it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiter {
    /// The name of its node below the lock's node.
    pub node: String,
    /// Its place in the queue: the number that the server gave to its node.
    pub sequence: i64,
    /// Its label, or what another library keeps in its node; bytes that are not UTF-8 are shown as U+FFFD.
    pub label: String,
    /// The token that its writes are fenced with once it holds.
    pub token: FencingToken,
    /// The session that owns it.
    pub session: SessionId,
    /// How long it has been in the queue: the time that the server noted, subtracted from this machine's clock.
    pub age: Duration,
}

impl Waiter {
    pub(crate) fn new(entry: Entry, data: Vec<u8>, stat: &Stat) -> Self {
        let created = SystemTime::UNIX_EPOCH + Duration::from_millis(stat.ctime.try_into().unwrap_or(0));
        Self {
            node: entry.name,
            sequence: entry.sequence,
            label: String::from_utf8_lossy(label(&data)).into_owned(),
            token: FencingToken::new(stat.czxid),
            session: SessionId(stat.ephemeral_owner),
            age: SystemTime::now().duration_since(created).unwrap_or_default(),
        }
    }
}
