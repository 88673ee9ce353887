//! ZooKeeper servers, a fault proxy and a session killer, for zklock's tests, examples and benches.
//!
//! ```no_run
//! # async fn example() {
//! let server = zklock_support::Server::shared().await;
//! let space = server.space("exclusion").await; // a chroot of its own
//! let client = space.connect().await;
//! # }
//! ```
//!
//! # Where a server comes from
//!
//! [`Server::shared`] looks once per process and takes the first that works:
//!
//! 1. `ZOOKEEPER_CONNECT`, a server or an ensemble that runs already. If set, nothing else is tried.
//! 2. A container: of `ZOOKEEPER_IMAGE` if set (then nothing else is tried), else of the official
//!    image `zookeeper:3.9`, else of `zklock-zookeeper:3.9`, which `docker/build-image.sh` builds
//!    from Debian's packages where no image registry can be reached.
//! 3. A local installation, as a child process: `java` (of `JAVA_HOME`, or on the `PATH`) and the
//!    jars of `ZOOKEEPER_HOME` or of Debian's package `zookeeper`.
//!
//! Otherwise the error names these three ways and why each failed.
//!
//! # What is left behind
//!
//! Nothing. A supervisor, a small shell process outside of our process group, holds the end of a
//! pipe from us. When we are gone for whatever reason, SIGKILL included, it removes the container,
//! or the java process and its folder. At an exit of ours, and on SIGINT and SIGTERM, we wait for it.

mod background;
mod connections;
mod container;
mod fault;
mod find;
mod local;
mod mntr;
mod proxy;
mod request;
mod server;
mod session;
mod space;
mod supervisor;

pub use connections::{Connections, Received};
pub use fault::{Fault, Rule};
pub use find::ServerError;
pub use mntr::Mntr;
pub use proxy::{Proxy, Traffic};
pub use request::{Op, Request};
pub use server::Server;
pub use session::kill_session;
pub use space::Space;
