//! What can go wrong: one type per operation, each saying what happened, to which path, and what it means.

use thiserror::Error;

use crate::zookeeper;

/// A lock was not made because its path or its options cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("lock path {path:?} {fault}")]
pub struct PathError {
    path: String,
    fault: PathFault,
}

impl PathError {
    pub(crate) fn new(path: &str, fault: PathFault) -> Self {
        Self { path: path.to_owned(), fault }
    }

    /// The path as it was given.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// What is wrong with it.
    pub fn fault(&self) -> &PathFault {
        &self.fault
    }
}

/// What is wrong with a path, or with the options that go with it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PathFault {
    /// It is the empty string.
    #[error("is empty: give the absolute path of the lock's node, such as \"/mylock\"")]
    Empty,
    /// It does not start with a slash.
    #[error("is not absolute: it has to start with '/'")]
    NotAbsolute,
    /// It is the root, which cannot be created or removed.
    #[error("is the root: a lock needs a node of its own below it")]
    Root,
    /// It ends in a slash.
    #[error("ends in '/': leave it out")]
    TrailingSlash,
    /// Two slashes follow each other.
    #[error("has an empty component: write one '/' only")]
    EmptyComponent,
    /// A component is `.` or `..`, which ZooKeeper does not resolve.
    #[error("has a relative component: ZooKeeper resolves neither '.' nor '..'")]
    RelativeComponent,
    /// ZooKeeper allows neither control characters, nor private use, nor anything outside the basic plane.
    #[error("has the character {0:?}, which ZooKeeper does not allow in a path")]
    Character(char),
    /// It is longer than 8 KiB.
    #[error("is longer than {} bytes", crate::name::MAX_PATH_LEN)]
    TooLong,
    /// The label of [`Options::label`](crate::Options::label) does not fit into a node.
    #[error("has a label of {0} bytes: a label of at most {max} bytes fits into its node", max = crate::options::MAX_LABEL_LEN)]
    LabelTooLong(usize),
    /// The list of [`Options::acl`](crate::Options::acl) is empty, so that nobody at all could use the node.
    #[error("has an empty access control list: give at least one entry, or leave the option out")]
    EmptyAcl,
}

/// An acquisition failed. Nothing of it is left in the queue, or nothing that the session's end does not remove.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LockError {
    /// The session ended: it expired, it was closed, or its authentication failed.
    ///
    /// Whatever it held is lost. Connect a new client and make a new lock with it.
    #[error("the ZooKeeper session ended while acquiring {path} ({state}): connect again and make a new lock")]
    SessionExpired {
        /// The lock's path.
        path: String,
        /// The last state of the session.
        state: zookeeper::SessionState,
    },
    /// The lock's node does not exist and was not to be created, see [`Parents::MustExist`](crate::Parents).
    #[error("the lock's node {path} does not exist, and Parents::MustExist forbids to create it")]
    NoParent {
        /// The lock's path.
        path: String,
    },
    /// The server refused a request for good.
    #[error("ZooKeeper refused to {doing} for the lock {path}: {source}{}", hint(source))]
    Refused {
        /// The lock's path.
        path: String,
        /// What was asked of the server.
        doing: &'static str,
        /// The server's answer.
        source: zookeeper::Error,
    },
    /// The queue's sequence numbers, 32 bits wide, are nearly used up, and the server would hand one out twice.
    ///
    /// They start again when the lock's node is deleted and created anew.
    #[error("the sequence numbers of the lock {path} are used up: delete the node while nobody uses the lock")]
    SequenceExhausted {
        /// The lock's path.
        path: String,
    },
    /// The connection broke at each attempt to enqueue, while other requests were answered.
    #[error(
        "each attempt to enqueue at the lock {path} broke the connection: is the label larger than the server's jute.maxbuffer?"
    )]
    Unanswered {
        /// The lock's path.
        path: String,
    },
    /// There is no tokio runtime to look after the node: neither was the session made in one nor is this call in one.
    #[error("no tokio runtime: make the session inside a runtime, or acquire {path} in one")]
    NoRuntime {
        /// The lock's path.
        path: String,
    },
    /// The runtime of the session was shut down.
    #[error("the tokio runtime of the session was shut down while acquiring {path}")]
    RuntimeShutdown {
        /// The lock's path.
        path: String,
    },
}

fn hint(source: &zookeeper::Error) -> &'static str {
    match source {
        zookeeper::Error::NoAuth => " (the access control list of a node does not allow it to this session)",
        zookeeper::Error::NoChildrenForEphemerals => {
            " (the lock's node is an ephemeral one, which can have no children: use another path)"
        }
        zookeeper::Error::InvalidAcl => {
            " (an entry of Options::acl is unknown to the server, or needs an authenticated session)"
        }
        _ => "",
    }
}

/// A lock could not be had at once, or not in time.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TryLockError {
    /// Somebody else holds the lock or waits for it.
    #[error("the lock is not free")]
    WouldBlock,
    /// The acquisition failed.
    #[error(transparent)]
    Lock(#[from] LockError),
}

/// A release that did not go as it should. In every case the guard holds nothing any more.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ReleaseError {
    /// The lock was not held any more: the session ended, or somebody deleted the node.
    ///
    /// What was done under the guard may have overlapped with the next holder, unless it was fenced.
    #[error("the lock was lost before its release: {node} was gone")]
    Lost {
        /// The path of the guard's node.
        node: String,
    },
    /// The server does not let us delete our node. It stays, and blocks the queue, until the session ends.
    #[error("ZooKeeper refused to delete {node}, which blocks the queue until the session ends: {source}")]
    Refused {
        /// The path of the guard's node.
        node: String,
        /// The server's answer.
        source: zookeeper::Error,
    },
    /// The runtime of the session was shut down; the node goes at the latest when the session ends.
    #[error("the tokio runtime of the session was shut down before {node} was seen to be deleted")]
    RuntimeShutdown {
        /// The path of the guard's node.
        node: String,
    },
}
