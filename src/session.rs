//! The ZooKeeper session that a lock lives in.

use std::fmt;

use tokio::runtime::Handle;

use crate::zookeeper::Client;

/// A ZooKeeper session, as locks use it.
///
/// Made from a [`Client`]: locks take anything that converts into a session, so a client can be passed as it is.
/// The session lives as long as the client, its clones, and the locks and guards made with it; once it expired,
/// connect a new client and make new locks.
///
/// The nodes of a lock are looked after by tasks on the tokio runtime that the session was made in, or, if it was
/// made outside of one, on the runtime of each acquisition. It should be the runtime that connected the client,
/// needs its timer enabled, and has to outlive the guards: a node whose runtime is shut down stays until the
/// session ends.
#[derive(Clone)]
pub struct Session {
    client: Client,
    runtime: Option<Handle>,
}

impl Session {
    /// The client of this session.
    pub fn client(&self) -> &Client {
        &self.client
    }

    pub(crate) fn runtime(&self) -> Option<Handle> {
        self.runtime.clone().or_else(|| Handle::try_current().ok())
    }
}

impl From<Client> for Session {
    fn from(client: Client) -> Self {
        Self { client, runtime: Handle::try_current().ok() }
    }
}

impl From<&Client> for Session {
    fn from(client: &Client) -> Self {
        client.clone().into()
    }
}

impl From<&Session> for Session {
    fn from(session: &Session) -> Self {
        session.clone()
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("id", &self.client.session_id())
            .field("state", &self.client.state())
            .field("chroot", &self.client.path())
            .finish_non_exhaustive()
    }
}
