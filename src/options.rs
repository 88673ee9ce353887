//! How a lock is set up.

use crate::error::{PathError, PathFault};
use crate::zookeeper::{Acl, Acls};

/// The longest label in bytes. The server closes the connection on a request of a megabyte.
pub(crate) const MAX_LABEL_LEN: usize = 1_000_000;

/// How the nodes of a lock are made. The default suits most: no label, open to everyone, parents as containers.
///
/// # Examples
/// ```
/// use zklock::{Options, Parents};
///
/// let options = Options::default().label("host-7, nightly backup").parents(Parents::Persistent);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Options {
    label: String,
    acl: Option<Vec<Acl>>,
    parents: Parents,
    naming: Naming,
    local_handoff: u32,
}

impl Options {
    /// A text that is kept in the node of each acquisition, for those who look at the queue. Empty by default.
    ///
    /// Everyone who may read the node can read it, so keep secrets out of it. At most 1,000,000 bytes.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = label.into();
        self
    }

    /// Who may do what with the nodes that the lock makes: its entries in the queue, its own node and the nodes
    /// above that it has to create. Everyone may do everything by default.
    ///
    /// All who use the lock need to create, read and delete there. Nodes that exist keep the list that they have.
    pub fn acl(mut self, acl: impl Into<Vec<Acl>>) -> Self {
        self.acl = Some(acl.into());
        self
    }

    /// How the lock's node and those above it are created where they are missing.
    pub fn parents(mut self, parents: Parents) -> Self {
        self.parents = parents;
        self
    }

    /// How the entries in the queue are named.
    pub fn naming(mut self, naming: Naming) -> Self {
        self.naming = naming;
        self
    }

    /// Lets the tasks that wait for the lock in the same session share their entries in the queue: one entry then
    /// serves up to `holds` holds in a row, which are passed on inside the process, without the server. Off by
    /// default, as with 0 and 1.
    ///
    /// This is for many tasks of one process that want the same lock for a short time each: most
    /// holds cost them no request to the server. What it changes:
    /// - The tasks are served in the order in which they came. The others in the queue wait for at most `holds` holds
    ///   for each entry that is before theirs, and the order between processes is that of entries, not of tasks.
    /// - The holders that share an entry share its node, and so its [fencing token](crate::FencingToken) and its
    ///   [label](Self::label). The token tells this process from others, but not its tasks from each other.
    /// - If the entry is lost, its current holder is told as always, and those who waited for it queue again,
    ///   under a new one, in their old order.
    /// - A [release](crate::MutexGuard::release) that passes the lock on does not ask the server whether the entry
    ///   was still there.
    ///
    /// It counts for [`lock`](crate::Mutex::lock) and [`try_lock_for`](crate::Mutex::try_lock_for), on every `Mutex`
    /// of the same path that is made with this option and the same client, or a clone of it.
    ///
    /// # Examples
    /// ```
    /// let options = zklock::Options::default().local_handoff(100);
    /// ```
    pub fn local_handoff(mut self, holds: u32) -> Self {
        self.local_handoff = holds;
        self
    }

    /// Checks what does not depend on a server.
    pub(crate) fn validate(&self, path: &str) -> Result<(), PathError> {
        if self.label.len() > MAX_LABEL_LEN {
            return Err(PathError::new(path, PathFault::LabelTooLong(self.label.len())));
        }
        if self.acl.as_ref().is_some_and(Vec::is_empty) {
            return Err(PathError::new(path, PathFault::EmptyAcl));
        }
        Ok(())
    }

    pub(crate) fn label_text(&self) -> &str {
        &self.label
    }

    /// If tasks of a session share entries: how many holds one of them serves.
    pub(crate) fn holds_of_an_entry(&self) -> Option<u32> {
        (self.local_handoff > 1).then_some(self.local_handoff)
    }

    pub(crate) fn naming_rule(&self) -> Naming {
        self.naming
    }

    pub(crate) fn acls(&self) -> Acls<'_> {
        self.acl.as_deref().map_or(Acls::anyone_all(), Acls::new)
    }

    pub(crate) fn parents_mode(&self) -> Parents {
        self.parents
    }
}

/// How the lock's node and those above it are created where they are missing.
///
/// Nodes that exist are never changed, whatever they are and whatever data they hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Parents {
    /// As containers: the server removes them some time (a minute by default) after their last child went.
    #[default]
    Container,
    /// As persistent nodes, which stay until somebody deletes them.
    Persistent,
    /// Not at all: without the lock's node, an acquisition fails with [`LockError::NoParent`](crate::LockError).
    MustExist,
}

/// How the entries in the queue are named.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Naming {
    /// `_c_<uuid>-lock-<sequence>`, with a UUID that makes an entry recognisable when the answer to its creation
    /// was lost. Curator's `InterProcessMutex` and go-zookeeper's `Lock` queue together with it as they are.
    #[default]
    Tagged,
    /// `lock-<sequence>`. A waiter knows the name of the one before it without asking for the list of all, so that
    /// what an acquisition costs does not grow with the queue.
    ///
    /// The price: names can come again when the lock's node is deleted and made anew. If somebody does that while
    /// the lock is held, the late release of the old holder deletes the entry of a new one that has come to have the
    /// same number. So choose it for long queues at locks whose node nobody deletes. An attempt whose answer was lost
    /// is found by an id in the data of its node; that takes a server of 3.6 or later.
    Compact,
}
