//! Runs a server to play with, found as tests find theirs, until Ctrl-C:
//!
//! ```sh
//! cargo run -p zklock-support --example serve
//! ```

use zklock_support::Server;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let server = match Server::try_shared().await {
        Ok(server) => server,
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(1);
        }
    };
    println!("{} ({}); Ctrl-C ends it", server.connect_string(), server.describe());
    std::future::pending::<()>().await;
}
