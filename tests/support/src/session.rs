//! Ending someone else's session, as the server does to one that timed out.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use zookeeper_client::SessionId;

use crate::Server;

/// Ends a session at once: its ephemeral nodes are gone when this returns, and its owner, whose
/// connection is closed, learns on reconnecting that the session has expired.
///
/// Another connection takes the session over and closes it. The password which that needs is not
/// known to us (`zookeeper_client` keeps it to itself), but ZooKeeper derives it from the session's
/// id.
///
/// # Errors
///
/// If the session is gone already, or the server cannot be talked to.
pub async fn kill_session(server: &Server, session: SessionId) -> io::Result<()> {
    timeout(Duration::from_secs(10), kill(server.first_host(), session)).await?
}

async fn kill(host: &str, session: SessionId) -> io::Result<()> {
    if !take_over_and_close(host, session).await?.existed {
        return Err(io::Error::new(io::ErrorKind::NotFound, format!("no session {session} to kill")));
    }
    // The owner reconnects, which may end our connection before the server has read that it should
    // close the session, or before it has said that it did.
    while take_over_and_close(host, session).await?.existed {}
    // The end of the session may still be on its way: what comes after it, as the start of another
    // does, is answered after it.
    take_over_and_close(host, SessionId(0)).await.map(drop)
}

struct TakenOver {
    existed: bool,
}

/// Asks for both in one write, to leave the owner little time to take its session back.
async fn take_over_and_close(host: &str, session: SessionId) -> io::Result<TakenOver> {
    let mut connection = TcpStream::connect(host).await?;
    connection.set_nodelay(true)?;
    connection.write_all(&[take_over(session), close()].concat()).await?;
    let Some(taken) = read_frame(&mut connection).await else {
        return Ok(TakenOver { existed: true });
    };
    let existed = taken.get(8..16) == Some(&session.0.to_be_bytes());
    read_frame(&mut connection).await;
    Ok(TakenOver { existed })
}

/// A connect request that asks for a session which exists, or for a new one with the id 0.
fn take_over(session: SessionId) -> Vec<u8> {
    let mut request = Vec::new();
    request.extend(0_i32.to_be_bytes()); // protocol version
    request.extend(0_i64.to_be_bytes()); // last zxid seen
    request.extend(10_000_i32.to_be_bytes()); // session time-out, milliseconds
    request.extend(session.0.to_be_bytes());
    request.extend(16_i32.to_be_bytes());
    request.extend(password(session));
    request.push(0); // not read-only
    frame(request)
}

fn close() -> Vec<u8> {
    const CLOSE_SESSION: i32 = -11;
    frame([1_i32.to_be_bytes(), CLOSE_SESSION.to_be_bytes()].concat())
}

fn frame(request: Vec<u8>) -> Vec<u8> {
    [&(request.len() as i32).to_be_bytes()[..], &request].concat()
}

/// The next answer, unless the connection ends.
async fn read_frame(connection: &mut TcpStream) -> Option<Vec<u8>> {
    let mut answer = vec![0; connection.read_i32().await.ok()? as usize];
    connection.read_exact(&mut answer).await.ok()?;
    Some(answer)
}

/// `ZooKeeperServer.generatePasswd`: 16 bytes of a `java.util.Random` seeded with the session's id.
fn password(session: SessionId) -> [u8; 16] {
    const SUPER_SECRET: i64 = 0xB341_5C00;
    const MULTIPLIER: u64 = 0x5_DEEC_E66D;
    const MASK: u64 = (1 << 48) - 1;
    let mut seed = ((session.0 ^ SUPER_SECRET) as u64 ^ MULTIPLIER) & MASK;
    let mut password = [0; 16];
    for word in password.chunks_exact_mut(4) {
        seed = (seed.wrapping_mul(MULTIPLIER) + 0xB) & MASK;
        word.copy_from_slice(&((seed >> 16) as u32).to_le_bytes());
    }
    password
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_killed_session_has_no_nodes_and_its_owner_learns_that_it_expired() {
        let server = Server::shared().await;
        let space = server.space("kill-session").await;
        let owner = space.connect().await;
        let options = zookeeper_client::CreateMode::Ephemeral.with_acls(zookeeper_client::Acls::anyone_all());
        owner.create("/mine", b"", &options).await.unwrap();

        kill_session(server, owner.session_id()).await.unwrap();

        assert_eq!(space.admin().check_stat("/mine").await.unwrap(), None);
        let mut states = owner.state_watcher();
        let mut state = states.state();
        while !state.is_terminated() {
            state = timeout(Duration::from_secs(5), states.changed()).await.unwrap();
        }
        assert_eq!(state, zookeeper_client::SessionState::Expired);
        let again = kill_session(server, owner.session_id()).await.unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::NotFound);
    }
}
