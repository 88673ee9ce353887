//! What a server counts of each of its connections.

use std::collections::BTreeMap;

use zookeeper_client::SessionId;

/// The connections of a server that belong to a session, its answer to the four-letter word `cons`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Connections {
    received: BTreeMap<i64, Received>,
}

/// What a server has received on a connection. A reconnect counts anew.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// Packets, pings included.
    pub packets: u64,
    /// The number of the last request, which the client counts up by one. Pings have none.
    pub requests: u64,
}

impl Connections {
    /// What has come from a session.
    ///
    /// # Panics
    ///
    /// If it is not connected.
    pub fn of(&self, session: SessionId) -> Received {
        match self.received.get(&session.0) {
            Some(received) => *received,
            None => panic!("session {session} is not connected"),
        }
    }

    /// Reads the answer's lines, `/address[..](name=value,..)`; those without a session are left out.
    pub(crate) fn parse(answer: &str) -> Connections {
        Connections { received: answer.lines().filter_map(connection).collect() }
    }

    /// Adds the connections of another of an ensemble's servers.
    pub(crate) fn add(&mut self, other: Connections) {
        self.received.extend(other.received);
    }
}

impl Received {
    /// What has come since an earlier look.
    ///
    /// # Panics
    ///
    /// If that was a look at another connection, which had received more.
    pub fn since(&self, earlier: &Received) -> Received {
        let rise = |now: u64, before: u64| now.checked_sub(before).expect("the connection is still the same");
        Received { packets: rise(self.packets, earlier.packets), requests: rise(self.requests, earlier.requests) }
    }
}

fn connection(line: &str) -> Option<(i64, Received)> {
    let (_, values) = line.trim().strip_suffix(')')?.rsplit_once('(')?;
    let values: BTreeMap<&str, &str> = values.split(',').filter_map(|value| value.split_once('=')).collect();
    let signed = |name: &str| Some(u64::from_str_radix(values.get(name)?.strip_prefix("0x")?, 16).ok()? as i64);
    let packets = values.get("recved")?.parse().ok()?;
    // Before the first request it is -1.
    let requests = signed("lcxid")?.max(0) as u64;
    Some((signed("sid")?, Received { packets, requests }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Server;

    const ANSWER: &str = " /10.0.0.1:4242[1](queued=0,recved=7,sent=8,sid=0x8000000000000001,lop=PING,est=1,to=1000,\
         lcxid=0x1f,lzxid=0x2,lresp=3,llat=0,minlat=0,avglat=0,maxlat=0)\n \
         /10.0.0.1:4243[1](queued=0,recved=1,sent=1,sid=0x2,lop=SESS,est=1,to=1000,lcxid=0xffffffffffffffff,\
         lzxid=0xffffffffffffffff,lresp=3,llat=0,minlat=0,avglat=0,maxlat=0)\n \
         /10.0.0.1:4244[0](queued=0,recved=1,sent=0)\n\n";

    #[test]
    fn connections_of_sessions_are_read_and_others_left_out() {
        let connections = Connections::parse(ANSWER);
        assert_eq!(connections.of(SessionId(i64::MIN + 1)), Received { packets: 7, requests: 31 });
        assert_eq!(connections.of(SessionId(2)), Received { packets: 1, requests: 0 });
        assert_eq!(connections.received.len(), 2);
    }

    #[tokio::test]
    async fn requests_are_counted_by_session_and_apart_from_pings() {
        let server = Server::shared().await;
        let space = server.space("connections").await;
        let client = space.connect().await;
        client.check_stat("/").await.unwrap();
        let before = server.connections().await.unwrap().of(client.session_id());
        for _ in 0..5 {
            client.check_stat("/").await.unwrap();
        }
        let received = server.connections().await.unwrap().of(client.session_id()).since(&before);
        assert_eq!(received.requests, 5);
        assert!(received.packets >= 5, "{received:?}");
    }
}
