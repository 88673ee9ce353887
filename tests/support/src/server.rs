//! A running ZooKeeper.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::OnceCell;
use tokio::time::{Instant, sleep, timeout};
use zookeeper_client::Client;

use crate::background::{runtime, say};
use crate::container::Container;
use crate::find::{Environment, Keeping, find};
use crate::local::Local;
use crate::{Connections, Mntr, ServerError, Space};

/// A running ZooKeeper: one server, or an ensemble that was given to us.
///
/// Its sessions can be as short as one second, and it answers every four-letter word, unless it was
/// given to us and was set up otherwise.
pub struct Server {
    /// `host:port`, separated by commas.
    hosts: String,
    /// The chroot of `ZOOKEEPER_CONNECT`, empty without one.
    root: String,
    connect_string: String,
    description: String,
    process: Process,
}

/// What runs the server.
enum Process {
    Given,
    Container(Container),
    Local(Local),
}

impl Server {
    /// The server of this process, found or started when it is first asked for.
    ///
    /// # Panics
    ///
    /// If there is none, with the text of [`ServerError`].
    pub async fn shared() -> &'static Server {
        Server::try_shared().await.unwrap_or_else(|error| panic!("{error}"))
    }

    /// As [`Server::shared`].
    ///
    /// # Errors
    ///
    /// If there is none. It is looked for once: later calls give the same error.
    pub async fn try_shared() -> Result<&'static Server, ServerError> {
        static SHARED: OnceCell<Result<Server, ServerError>> = OnceCell::const_new();
        let server = SHARED.get_or_init(|| find_in_background(Environment::of_process(), Keeping::Nothing)).await;
        server.as_ref().map_err(ServerError::clone)
    }

    /// Starts a server for one test, which may [stop](Server::stop) it and [start](Server::start) it
    /// again. It is removed when dropped. `ZOOKEEPER_CONNECT` does not count here.
    ///
    /// # Panics
    ///
    /// If it cannot be started, with the text of [`ServerError`].
    pub async fn start_own() -> Server {
        let environment = Environment { connect: None, ..Environment::of_process() };
        let server = find_in_background(environment, Keeping::DataAndPort).await;
        server.unwrap_or_else(|error| panic!("{error}"))
    }

    /// How to connect, say `127.0.0.1:32769`.
    pub fn connect_string(&self) -> &str {
        &self.connect_string
    }

    /// Which server this is, say `container zklock-zookeeper:3.9`.
    pub fn describe(&self) -> &str {
        &self.description
    }

    /// The server's counters; of an ensemble, the sum over its servers.
    ///
    /// # Errors
    ///
    /// If a server cannot be reached, or does not answer this word.
    pub async fn mntr(&self) -> io::Result<Mntr> {
        let mut sum = Mntr::default();
        for host in self.hosts.split(',') {
            let answer = four_letter_word(host, "mntr").await?;
            if !answer.starts_with("zk_version") {
                return Err(io::Error::other(format!("{host} does not answer 'mntr': {answer}")));
            }
            sum.add(Mntr::parse(&answer));
        }
        Ok(sum)
    }

    /// What the server counts of each connection; of an ensemble, those of all its servers.
    ///
    /// # Errors
    ///
    /// If a server cannot be reached.
    pub async fn connections(&self) -> io::Result<Connections> {
        let mut all = Connections::default();
        for host in self.hosts.split(',') {
            all.add(Connections::parse(&four_letter_word(host, "cons").await?));
        }
        Ok(all)
    }

    /// The answer to a four-letter word; of an ensemble, that of the first server.
    ///
    /// # Errors
    ///
    /// If the server cannot be reached.
    pub async fn four_letter_word(&self, word: &str) -> io::Result<String> {
        four_letter_word(self.first_host(), word).await
    }

    /// The server's version, say `3.9.3`.
    ///
    /// # Errors
    ///
    /// If the server cannot be reached, or does not answer the word `srvr`.
    pub async fn version(&self) -> io::Result<String> {
        let answer = self.four_letter_word("srvr").await?;
        let version = answer.strip_prefix("Zookeeper version: ").and_then(|rest| rest.split(['-', ',']).next());
        let version = version.ok_or_else(|| io::Error::other(format!("no version in: {answer}")))?;
        Ok(version.to_owned())
    }

    /// Makes a chroot of its own for a test, `/zklock-it/<name>-<unique>`.
    ///
    /// # Panics
    ///
    /// If the server does not let us.
    pub async fn space(&self, name: &str) -> Space<'_> {
        Space::make(self, name).await
    }

    /// Kills a server of [`Server::start_own`], as a crash would. Its data and its port stay.
    ///
    /// # Errors
    ///
    /// If this server was given to us, or what runs it does not obey.
    pub async fn stop(&self) -> io::Result<()> {
        match &self.process {
            Process::Given => Err(not_ours()),
            Process::Container(container) => container.kill().await,
            Process::Local(local) => local.kill(),
        }
    }

    /// Starts a stopped server again and waits until it answers.
    ///
    /// # Errors
    ///
    /// If this server was given to us, or does not come up.
    pub async fn start(&self) -> io::Result<()> {
        match &self.process {
            Process::Given => Err(not_ours()),
            Process::Container(container) => container.run().await,
            Process::Local(local) => local.run().await,
        }
    }

    /// The address of the server, or of the first of an ensemble.
    pub(crate) fn first_host(&self) -> &str {
        self.hosts.split(',').next().unwrap_or(&self.hosts)
    }

    /// How to connect to a path that is below the server's own root.
    pub(crate) fn connect_string_of(&self, path: &str) -> String {
        format!("{}{path}", self.connect_string)
    }

    /// The connect string of a path with another address, that of a proxy.
    pub(crate) fn connect_string_through(&self, address: &str, path: &str) -> String {
        format!("{address}{}{path}", self.root)
    }

    /// Whether it lives on after us.
    pub(crate) fn is_given(&self) -> bool {
        matches!(self.process, Process::Given)
    }

    pub(crate) async fn given(connect: &str) -> Result<Server, String> {
        let deadline = Instant::now() + Duration::from_secs(5);
        let connector = Client::connector().with_session_timeout(Duration::from_secs(10)).with_fail_eagerly();
        let client = loop {
            match timeout(Duration::from_secs(5), connector.clone().connect(connect)).await {
                Ok(Ok(client)) => break client,
                Ok(Err(error)) if Instant::now() > deadline => {
                    return Err(format!("{connect} does not answer: {error}"));
                }
                Ok(Err(_)) => sleep(Duration::from_millis(200)).await,
                Err(_) => return Err(format!("{connect} does not answer within 5 s")),
            }
        };
        match client.check_stat("/").await {
            Ok(Some(_)) => Ok(Server::new(connect, format!("ZOOKEEPER_CONNECT={connect}"), Process::Given)),
            Ok(None) => Err(format!("there is no node {} on {connect}", client.path())),
            Err(error) => Err(format!("{connect} does not let us look: {error}")),
        }
    }

    pub(crate) fn container(address: &str, description: String, container: Container) -> Server {
        Server::new(address, description, Process::Container(container))
    }

    pub(crate) fn local(address: &str, description: String, local: Local) -> Server {
        Server::new(address, description, Process::Local(local))
    }

    fn new(connect: &str, description: String, process: Process) -> Server {
        let (hosts, root) = match connect.find('/') {
            Some(slash) => connect.split_at(slash),
            None => (connect, ""),
        };
        let root = root.trim_end_matches('/');
        Server {
            hosts: hosts.to_owned(),
            root: root.to_owned(),
            connect_string: format!("{hosts}{root}"),
            description,
            process,
        }
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Server({}, {})", self.connect_string, self.description)
    }
}

/// Has java look for empty containers every second instead of every minute: what they do to a lock has to happen
/// while the tests run.
pub(crate) const CONTAINER_CHECKS: &str = "-Dznode.container.checkIntervalMs=1000";

/// The configuration of a server that we start.
pub(crate) struct Setting {
    /// The key in `zoo.cfg`.
    pub(crate) key: &'static str,
    /// The official image's variable for it, if it has one.
    pub(crate) variable: Option<&'static str>,
    pub(crate) value: String,
}

pub(crate) fn settings() -> Vec<Setting> {
    // Tests hold little that a power failure could harm. ZOOKEEPER_FORCE_SYNC=yes is for measuring
    // with the disk.
    let force_sync = std::env::var("ZOOKEEPER_FORCE_SYNC").unwrap_or_else(|_| "no".into());
    let table: [(&str, Option<&str>, &str); 8] = [
        // The shortest session is two ticks.
        ("tickTime", Some("ZOO_TICK_TIME"), "500"),
        ("maxSessionTimeout", None, "60000"),
        ("maxClientCnxns", Some("ZOO_MAX_CLIENT_CNXNS"), "0"),
        ("4lw.commands.whitelist", Some("ZOO_4LW_COMMANDS_WHITELIST"), "*"),
        ("admin.enableServer", Some("ZOO_ADMINSERVER_ENABLED"), "false"),
        ("standaloneEnabled", Some("ZOO_STANDALONE_ENABLED"), "true"),
        // Kilobytes by which the log grows.
        ("preAllocSize", None, "1024"),
        ("forceSync", None, &force_sync),
    ];
    table.map(|(key, variable, value)| Setting { key, variable, value: value.to_owned() }).into()
}

pub(crate) async fn four_letter_word(host: &str, word: &str) -> io::Result<String> {
    let ask = async {
        let mut connection = TcpStream::connect(host).await?;
        connection.write_all(word.as_bytes()).await?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await?;
        Ok(answer)
    };
    timeout(Duration::from_secs(5), ask).await?
}

/// Whether a server answers, rather than just something that accepts connections.
pub(crate) async fn answers(host: &str) -> bool {
    four_letter_word(host, "srvr").await.is_ok_and(|answer| answer.contains("Mode: "))
}

async fn find_in_background(environment: Environment, keeping: Keeping) -> Result<Server, ServerError> {
    // Not on the runtime of the test that happens to come first: it ends before the others do.
    let found = runtime().spawn(async move { find(&environment, keeping).await }).await;
    let server = found.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))?;
    if std::env::var_os("ZKLOCK_SUPPORT_VERBOSE").is_some() {
        say(format_args!("zklock-support: {} at {}", server.description, server.connect_string));
    }
    Ok(server)
}

fn not_ours() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "this server was given by ZOOKEEPER_CONNECT and is not ours to stop")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_given_chroot_is_kept() {
        let server = Server::new("a:1,b:2/root/", String::new(), Process::Given);
        assert_eq!(server.connect_string(), "a:1,b:2/root");
        assert_eq!(server.connect_string_of("/x"), "a:1,b:2/root/x");
        assert_eq!(server.connect_string_through("p:3", "/x"), "p:3/root/x");
        assert_eq!(server.first_host(), "a:1");
    }

    #[tokio::test]
    async fn the_shared_server_counts_and_knows_its_version() {
        let server = Server::shared().await;
        let version = server.version().await.unwrap();
        assert!(version.starts_with("3."), "{version}");
        let before = server.mntr().await.unwrap();
        let rise = server.mntr().await.unwrap().since(&before);
        assert!(rise.packets_received() >= 1);
        assert_eq!(server.four_letter_word("ruok").await.unwrap(), "imok");
    }

    #[tokio::test]
    async fn a_server_of_our_own_keeps_its_data_and_its_port_when_it_is_killed() {
        let server = Server::start_own().await;
        let space = server.space("own").await;
        let options = zookeeper_client::CreateMode::Persistent.with_acls(zookeeper_client::Acls::anyone_all());
        space.admin().create("/kept", b"data", &options).await.unwrap();

        server.stop().await.unwrap();
        assert!(!answers(server.first_host()).await);
        server.start().await.unwrap();

        let client = space.connect().await;
        assert_eq!(client.get_data("/kept").await.unwrap().0, b"data");
    }
}
