//! What the examples share.

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use zklock::zookeeper::Client;

/// Whatever ended an example; `main` prints it.
pub type Failure = Box<dyn Error + Send + Sync>;

/// The exit code of an example called `name`, after its failure, if any, went to stderr.
pub fn exit_code(name: &str, outcome: Result<(), Failure>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{name}: {failure}");
            ExitCode::FAILURE
        }
    }
}

/// Opens a session of its own at `address` (`host:port/chroot`), asking for the time-out `timeout`.
pub async fn open_session(address: &str, timeout: Duration) -> Result<Client, Failure> {
    Client::connector().with_session_timeout(timeout).connect(address).await.map_err(|error| {
        format!(
            "cannot open a session at {address}: {error} (many sessions? a server takes only \
                 so many connections from one address: its maxClientCnxns)"
        )
        .into()
    })
}
