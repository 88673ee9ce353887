//! Fair distributed locks on Apache ZooKeeper.
//!
//! Each contender is an ephemeral sequential node below the lock's node. The lowest sequence number holds the lock;
//! everyone else watches only the node just before its own. So waiters are served in order, a release wakes exactly
//! one of them, and the node of a process that dies goes when its session does.
//!
//! ```no_run
//! use zklock::Mutex;
//! use zklock::zookeeper::Client;
//!
//! #[tokio::main]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let client = Client::connect("localhost:2181").await?;
//!     let mutex = Mutex::new(client, "/mylock")?;
//!
//!     let guard = mutex.lock().await?;
//!     println!("nobody else is here; my token is {}", guard.fencing_token());
//!     guard.release().await?;
//!     Ok(())
//! }
//! ```
//!
//! # What is guaranteed
//! - **Exclusion.** While the session of a holder lives, nobody else holds the same path.
//! - **Order.** Waiters are granted in the order in which the server received them, over all processes.
//! - **No herd.** A release wakes the next waiter alone, however long the queue.
//! - **Nothing is left behind.** Dropping a future or a guard at any moment takes its node out of the queue, and
//!   whatever cannot be taken out goes with the session. An error that leaves open whether a request was carried
//!   out is never taken for a yes or a no.
//!
//! # What is not guaranteed
//! A lock on ZooKeeper is a lease. If a process is stopped or cut off for longer than its session time-out, the
//! server ends the session and grants the lock to the next waiter, while the old holder may still believe that it
//! holds it. No lock service can prevent that; what is written under the lock can be made safe against it:
//! - Send [`MutexGuard::fencing_token`] along with each write, and let the store refuse smaller tokens.
//! - Write to ZooKeeper itself through [`MutexGuard::check_writer`], which commits only while the lock is held.
//! - [`MutexGuard::release`] tells afterwards whether the lock had been lost.
//!
//! This version does not yet tell a holder *during* its hold that the lock was lost; until it does, watch the state
//! of the client, and take anything but `SyncConnected` as a warning.
#![forbid(unsafe_code)]
#![warn(missing_docs)]
// Each private module documents what it is for; what is public in them is public to the crate.
#![allow(unreachable_pub)]

mod cohort;
mod contender;
mod driver;
mod error;
mod guard;
mod local;
mod mutex;
mod name;
mod options;
mod queue;
mod session;
mod waiter;

pub use zookeeper_client as zookeeper;

pub use crate::error::{LockError, PathError, PathFault, ReleaseError, TryLockError};
pub use crate::guard::{FencingToken, MutexGuard};
pub use crate::mutex::Mutex;
pub use crate::options::{Naming, Options, Parents};
pub use crate::session::Session;
pub use crate::waiter::Waiter;

/// The examples of the README compile.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
