//! What a proxy does to a connection, and at which request.

use std::sync::{Arc, Mutex};

use tokio::sync::watch;

use crate::background::lock;
use crate::request::Request;

/// What to do to a connection at a request: by default before it is forwarded, once, at the first that comes.
///
/// Whatever the connection carried in that direction before still arrives.
#[derive(Clone, Copy, Debug)]
#[must_use = "it has to be given to `Proxy::arm`"]
pub struct Fault {
    pub(crate) how: How,
    pub(crate) at_answer: bool,
    pub(crate) until_restored: bool,
    nth: u32,
    times: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    Nothing,
    Fin,
    Reset,
    Silence { up: bool, down: bool },
    Hold,
}

impl Fault {
    /// Nothing happens, and the rule tells that the request or its answer is about to pass.
    pub fn none() -> Fault {
        Fault::by(How::Nothing)
    }

    /// Closes the connection in an orderly way: both sides are sent a FIN.
    pub fn fin() -> Fault {
        Fault::by(How::Fin)
    }

    /// Resets the connection: both sides are sent an RST.
    pub fn reset() -> Fault {
        Fault::by(How::Reset)
    }

    /// Keeps the connection, and swallows all that either side sends from there on.
    pub fn silence() -> Fault {
        Fault::by(How::Silence { up: true, down: true })
    }

    /// Keeps the connection, and swallows what the client sends from there on. What the server sends still arrives.
    pub fn silence_requests() -> Fault {
        Fault::by(How::Silence { up: true, down: false })
    }

    /// Keeps the connection, and swallows what the server sends from there on. What the client sends still arrives
    /// and has its effect, the request included.
    pub fn silence_answers() -> Fault {
        Fault::by(How::Silence { up: false, down: true })
    }

    /// Holds the request or its answer back, and all that follows it in its direction, until [`Rule::lift`].
    pub fn hold() -> Fault {
        Fault::by(How::Hold)
    }

    /// Not before the request is forwarded, but when the server has answered, before the answer is passed on.
    pub fn at_answer(self) -> Fault {
        Fault { at_answer: true, ..self }
    }

    /// Not at the first such request from now on, but at the n-th.
    pub fn nth(self, nth: u32) -> Fault {
        assert!(nth > 0, "the first is number 1");
        Fault { nth, ..self }
    }

    /// Not only once, but at so many such requests in a row.
    pub fn times(self, times: u32) -> Fault {
        Fault { times, ..self }
    }

    /// Later connections do not work at once but after [`Proxy::restore`](crate::Proxy::restore): until then they are
    /// refused, or silent as this one is. Those that are open fare like it.
    pub fn until_restored(self) -> Fault {
        Fault { until_restored: true, ..self }
    }

    fn by(how: How) -> Fault {
        Fault { how, at_answer: false, until_restored: false, nth: 1, times: 1 }
    }
}

/// A [`Fault`] that waits for its request. It is disarmed when this is dropped.
#[must_use = "the fault is disarmed when its rule is dropped"]
pub struct Rule {
    armed: Arc<Armed>,
    rules: Arc<Rules>,
}

impl Rule {
    /// Resolves once the fault has happened at least once, and its effect is there.
    pub async fn fired(&self) {
        let mut fired = self.armed.fired.subscribe();
        // The sender is ours.
        let _ = fired.wait_for(|times| *times > 0).await;
    }

    /// How often it has happened.
    pub fn count(&self) -> u32 {
        *self.armed.fired.borrow()
    }

    /// Lets pass what is held back, and holds nothing back any more.
    pub fn lift(&self) {
        self.armed.lifted.send_replace(true);
    }
}

impl Drop for Rule {
    fn drop(&mut self) {
        lock(&self.rules.armed).retain(|armed| !Arc::ptr_eq(armed, &self.armed));
        lock(&self.armed.due).left = 0;
        self.lift();
    }
}

impl std::fmt::Debug for Rule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Rule({:?}, fired {} times)", self.armed.fault, self.count())
    }
}

/// The rules of a proxy, in the order in which they were armed.
#[derive(Default)]
pub(crate) struct Rules {
    armed: Mutex<Vec<Arc<Armed>>>,
}

impl Rules {
    pub(crate) fn arm(
        self: &Arc<Self>,
        fault: Fault,
        matches: impl Fn(&Request) -> bool + Send + Sync + 'static,
    ) -> Rule {
        let armed = Arc::new(Armed {
            fault,
            matches: Box::new(matches),
            due: Mutex::new(Due { ahead: fault.nth - 1, left: fault.times }),
            fired: watch::Sender::new(0),
            lifted: watch::Sender::new(false),
        });
        lock(&self.armed).push(armed.clone());
        Rule { armed, rules: self.clone() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.armed).is_empty()
    }

    /// The first rule that is due at this request. Those after it do not see it.
    pub(crate) fn due(&self, request: &Request) -> Option<Arc<Armed>> {
        lock(&self.armed).iter().find(|armed| armed.is_due(request)).cloned()
    }
}

pub(crate) struct Armed {
    pub(crate) fault: Fault,
    matches: Box<dyn Fn(&Request) -> bool + Send + Sync>,
    due: Mutex<Due>,
    fired: watch::Sender<u32>,
    lifted: watch::Sender<bool>,
}

struct Due {
    /// So many requests are to be let pass.
    ahead: u32,
    /// So often it is to happen.
    left: u32,
}

impl Armed {
    fn is_due(&self, request: &Request) -> bool {
        let mut due = lock(&self.due);
        match (due.left, due.ahead) {
            (0, _) => false,
            _ if !(self.matches)(request) => false,
            (_, 0) => {
                due.left -= 1;
                true
            }
            _ => {
                due.ahead -= 1;
                false
            }
        }
    }

    /// The answer that it waited for does not come on this connection: the next such request will do.
    pub(crate) fn is_due_again(&self) {
        lock(&self.due).left += 1;
    }

    pub(crate) fn fire(&self) {
        self.fired.send_modify(|times| *times += 1);
    }

    pub(crate) async fn lifted(&self) {
        let mut lifted = self.lifted.subscribe();
        let _ = lifted.wait_for(|is_lifted| *is_lifted).await;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::time::{sleep, timeout};
    use zookeeper_client::{Acls, Client, CreateMode, CreateOptions, Error};

    use super::*;
    use crate::{Op, Proxy, Server, Space};

    const PERSISTENT: CreateOptions<'static> = CreateMode::Persistent.with_acls(Acls::anyone_all());

    async fn connect(name: &str) -> (Space<'static>, Proxy, Client) {
        let server = Server::shared().await;
        let space = server.space(name).await;
        let proxy = Proxy::start(server.connect_string()).await;
        let client = space.connect_through(&proxy, Duration::from_secs(40)).await;
        (space, proxy, client)
    }

    async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
        timeout(Duration::from_secs(60), future).await.unwrap_or_else(|_| panic!("in vain waited for {what}"))
    }

    async fn exists(space: &Space<'_>, path: &str) -> bool {
        space.admin().check_stat(path).await.unwrap().is_some()
    }

    fn creates(name: &'static str) -> impl Fn(&Request) -> bool {
        move |request| request.op == Op::Create && request.path.ends_with(name)
    }

    #[tokio::test]
    async fn requests_are_read_with_their_kind_their_path_and_their_watch() {
        let (space, proxy, client) = connect("requests").await;
        let (seen, mut requests) = tokio::sync::mpsc::unbounded_channel();
        let observing = proxy.arm(Fault::none().times(u32::MAX), move |request| {
            let _ = seen.send(request.clone());
            true
        });
        let container = CreateMode::Container.with_acls(Acls::anyone_all());
        let sequential = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
        client.create("/a", b"data", &container).await.unwrap();
        let (_, sequence) = client.create("/a/x-", b"", &sequential).await.unwrap();
        let own = format!("/a/x-{sequence}");
        client.check_stat(&own).await.unwrap();
        client.check_and_watch_stat(&own).await.unwrap();
        client.get_data(&own).await.unwrap();
        let (_, _, watcher) = client.get_and_watch_data(&own).await.unwrap();
        client.list_children("/a").await.unwrap();
        client.get_children("/a").await.unwrap();
        client.list_and_watch_children("/a").await.unwrap();
        client.sync("/a").await.unwrap();
        client.list_ephemerals("/a").await.unwrap();
        client.set_data("/a", b"", None).await.unwrap();
        let mut writer = client.new_multi_writer();
        writer.add_check_version("/a", 1).unwrap();
        writer.add_create("/a/y-", b"more data", &sequential).unwrap();
        writer.add_set_data(&own, b"and more", None).unwrap();
        writer.add_delete(&own, None).unwrap();
        writer.commit().await.unwrap();
        watcher.changed().await;
        let (_, _, watcher) = client.get_and_watch_data("/a").await.unwrap();
        proxy.reset();
        // It may still be asked for on the connection that is gone.
        while client.delete("/a/none", None).await != Err(Error::NoNode) {}

        let own = &own[..];
        let expected = [
            (Op::Create, "/a", false),
            (Op::Create, "/a/x-", false),
            (Op::Exists, own, false),
            (Op::Exists, own, true),
            (Op::GetData, own, false),
            (Op::GetData, own, true),
            (Op::GetChildren, "/a", false),
            (Op::GetChildren, "/a", false),
            (Op::GetChildren, "/a", true),
            (Op::Sync, "/a", false),
            (Op::GetEphemerals, "/a", false),
            (Op::SetData, "/a", false),
            (Op::Multi, "", false),
            (Op::GetData, "/a", true),
            (Op::Connect, "", false),
            (Op::SetWatches, "", true),
        ];
        let mut read = Vec::new();
        let reading = async {
            while read.len() <= expected.len() {
                let request = requests.recv().await.unwrap();
                // The watches that were not kept are removed some time, and so is a ping sent.
                if !matches!(request.op, Op::Ping | Op::Other(_)) {
                    read.push(request);
                }
            }
        };
        within("all requests", reading).await;
        for (request, (op, path, watches)) in read.iter().zip(expected) {
            let path = if path.is_empty() { String::new() } else { format!("{}{path}", space.path()) };
            assert_eq!((request.op, &request.path, request.watches), (op, &path, watches));
        }
        let last = read.last().unwrap();
        assert!(last.op == Op::Delete && last.path.ends_with("/a/none"), "{last:?}");
        let multi = read.iter().find(|request| request.op == Op::Multi).unwrap();
        assert!(multi.is_multi_of(&[Op::Check, Op::Create, Op::SetData, Op::Delete]), "{multi:?}");
        assert!(!multi.is_multi_of(&[Op::Check]));
        assert!(multi.parts[1].path.ends_with("/a/y-") && multi.parts[3].path.ends_with(own), "{multi:?}");
        assert!(observing.count() as usize > expected.len());
        drop(watcher);
    }

    #[tokio::test]
    async fn a_request_that_the_connection_breaks_before_has_no_effect_and_one_whose_answer_is_lost_has() {
        let (space, proxy, client) = connect("breaks").await;
        let is_orderly = |error: &Error| *error == Error::ConnectionLoss;
        for (fault, expects_orderly) in [(Fault::fin(), true), (Fault::reset(), false)] {
            let before = proxy.arm(fault, creates("/before"));
            let error = within("an error", client.create("/before", b"", &PERSISTENT)).await.unwrap_err();
            assert_eq!(is_orderly(&error), expects_orderly, "{fault:?}: {error}");
            assert!(!exists(&space, "/before").await);
            assert_eq!(before.count(), 1);

            let after = proxy.arm(fault.at_answer(), creates("/after"));
            let error = within("an error", client.create("/after", b"", &PERSISTENT)).await.unwrap_err();
            assert_eq!(is_orderly(&error), expects_orderly, "{fault:?}: {error}");
            assert!(exists(&space, "/after").await);
            within("the rule", after.fired()).await;
            // It works again at once, and happens once.
            within("the session", client.delete("/after", None)).await.unwrap();
            client.create("/after", b"", &PERSISTENT).await.unwrap();
            client.delete("/after", None).await.unwrap();
            assert_eq!(after.count(), 1);
        }
    }

    #[tokio::test]
    async fn it_is_the_nth_request_of_its_kind_and_as_many_as_was_asked_for() {
        let (space, proxy, client) = connect("nth").await;
        let rule = proxy.arm(Fault::fin().nth(3).times(2), |request| request.op == Op::Create);
        let mut outcomes = Vec::new();
        for n in 1..=6 {
            client.check_stat("/").await.unwrap();
            outcomes.push(client.create(&format!("/{n}"), b"", &PERSISTENT).await.is_ok());
        }
        assert_eq!(outcomes, [true, true, false, false, true, true]);
        assert_eq!(rule.count(), 2);
        assert!(!exists(&space, "/3").await && exists(&space, "/5").await);
    }

    #[tokio::test]
    async fn later_connections_are_refused_until_restored_if_so_wished() {
        let (_space, proxy, client) = connect("refused").await;
        for fault in [Fault::fin(), Fault::reset(), Fault::fin().at_answer(), Fault::reset().at_answer()] {
            let rule = proxy.arm(fault.until_restored(), |request| request.op == Op::Sync);
            client.sync("/").await.unwrap_err();
            within("the rule", rule.fired()).await;
            assert!(tokio::net::TcpStream::connect(proxy.addr()).await.is_err(), "{fault:?}");
            proxy.restore();
            within("the session", client.sync("/")).await.unwrap();
        }
    }

    #[tokio::test]
    async fn silence_begins_at_the_request_or_at_its_answer_and_ends_when_restored() {
        let (space, proxy, client) = connect("silence").await;
        for fault in [Fault::silence(), Fault::silence().until_restored()] {
            for fault in [fault, fault.at_answer()] {
                let rule = proxy.arm(fault, creates("/silent"));
                let creating = client.create("/silent", b"", &PERSISTENT);
                within("the rule", rule.fired()).await;
                assert_eq!(exists(&space, "/silent").await, fault.at_answer);
                let connections = proxy.traffic().connections;
                let mut other = tokio::net::TcpStream::connect(proxy.addr()).await.unwrap();
                other.write_all(b"ruok").await.unwrap();
                match fault.until_restored {
                    true => drop(timeout(Duration::from_millis(200), other.read_u32()).await.unwrap_err()),
                    false => assert_eq!(within("an answer", other.read_u32()).await.unwrap().to_be_bytes(), *b"imok"),
                }
                assert_eq!(proxy.traffic().connections, connections + 1, "the session's own was closed");
                proxy.restore();
                within("the end", creating).await.unwrap_err();
                within("the session", client.check_stat("/")).await.unwrap();
                let _ = client.delete("/silent", None).await;
            }
        }
    }

    #[tokio::test]
    async fn in_one_direction_silence_leaves_the_other() {
        let (space, proxy, client) = connect("one-way").await;
        client.create("/watched", b"", &PERSISTENT).await.unwrap();
        let (_, _, watcher) = client.get_and_watch_data("/watched").await.unwrap();

        let rule = proxy.arm(Fault::silence_requests(), creates("/1"));
        let creating = client.create("/1", b"", &PERSISTENT);
        within("the rule", rule.fired()).await;
        space.admin().set_data("/watched", b"changed", None).await.unwrap();
        within("the event", watcher.changed()).await;
        assert!(!exists(&space, "/1").await);
        proxy.restore();
        within("the end", creating).await.unwrap_err();

        let rule = proxy.arm(Fault::silence_answers(), creates("/2"));
        let creating = client.create("/2", b"", &PERSISTENT);
        within("the rule", rule.fired()).await;
        within("its effect", async {
            while !exists(&space, "/2").await {
                sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        proxy.restore();
        within("the end", creating).await.unwrap_err();
    }

    #[tokio::test]
    async fn what_is_held_back_passes_when_lifted_with_all_that_came_after_it() {
        let (space, proxy, client) = connect("hold").await;
        for fault in [Fault::hold(), Fault::hold().at_answer()] {
            let rule = proxy.arm(fault, creates("/held"));
            let creating = client.create("/held", b"", &PERSISTENT);
            within("the rule", rule.fired()).await;
            let reading = client.check_stat("/held");
            let mut both = Box::pin(futures::future::join(creating, reading));
            assert!(timeout(Duration::from_millis(100), &mut both).await.is_err());
            assert_eq!(exists(&space, "/held").await, fault.at_answer);
            rule.lift();
            let (created, read) = within("both", both).await;
            assert!(created.is_ok() && read.unwrap().is_some());
            client.delete("/held", None).await.unwrap();
        }
    }

    #[tokio::test]
    async fn an_answer_that_never_comes_is_waited_for_at_the_next_request() {
        let (_space, proxy, client) = connect("again").await;
        let (seen, mut requests) = tokio::sync::mpsc::unbounded_channel();
        let holding = proxy.arm(Fault::hold().at_answer(), |request| request.op == Op::Sync);
        let rule =
            proxy.arm(Fault::fin().at_answer(), move |request| request.op == Op::Exists && seen.send(()).is_ok());
        let (held, lost) = (client.sync("/"), client.check_stat("/"));
        within("the rule", holding.fired()).await;
        // The request was forwarded, and its answer is behind what is held back.
        within("the request", requests.recv()).await.unwrap();
        proxy.reset();
        let (held, lost) = within("the end", futures::future::join(held, lost)).await;
        assert!(held.is_err() && lost.is_err() && rule.count() == 0);
        // The first of these may be asked for on the connection that is gone.
        let asking = async { while client.check_stat("/").await.is_err() && rule.count() == 0 {} };
        within("an error", asking).await;
        within("the rule", rule.fired()).await;
    }

    #[tokio::test]
    async fn a_rule_that_is_dropped_is_disarmed() {
        let (_space, proxy, client) = connect("disarmed").await;
        drop(proxy.arm(Fault::fin(), |_| true));
        client.sync("/").await.unwrap();
        let held = proxy.arm(Fault::hold(), |request| request.op == Op::Sync);
        let syncing = client.sync("/");
        within("the rule", held.fired()).await;
        drop(held);
        within("what was held", syncing).await.unwrap();
    }
}
