//! A server of a local installation, as a child process of its supervisor.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::time::{Instant, sleep};

use crate::find::{Environment, Keeping};
use crate::server::{self, CONTAINER_CHECKS, Server, Setting, settings};
use crate::supervisor::Supervisor;

/// How long a server may take to answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// A local server, which can be killed and run again.
pub(crate) struct Local {
    supervisor: Supervisor,
    address: String,
}

/// Starts a local server. The error says what it would have taken.
pub(crate) async fn start(environment: &Environment, _: Keeping) -> Result<Server, String> {
    let java = find_java(environment)?;
    let installation = find_jars(environment)?;
    // Between our finding a free port and the server's taking it, someone else may.
    for _ in 0..5 {
        let port = free_port().await?;
        let local = Local::start(&java, &installation, port)?;
        match local.wait_until_ready().await {
            Ok(()) => {
                let description = format!("local java, {}", installation.place.display());
                return Ok(Server::local(&local.address.clone(), description, local));
            }
            Err(log) if log.contains("Address already in use") => {}
            Err(log) => return Err(format!("{} was run and ended, or did not answer: {log}", java.display())),
        }
    }
    Err("no port stayed free long enough for a server to take it".into())
}

impl Local {
    fn start(java: &Path, installation: &Installation, port: u16) -> Result<Local, String> {
        let failed = |error| format!("cannot run {}: {error}", java.display());
        let mut command: Vec<OsString> = vec![java.into()];
        // The last leaves no file of java's own in the folder for temporary files.
        command.extend(["-Xmx512m", "-XX:+UseSerialGC", "-XX:-UsePerfData"].map(Into::into));
        command.extend(["-Dzookeeper.jmx.log4j.disable=true", CONTAINER_CHECKS, "-cp"].map(Into::into));
        command.push(installation.class_path.clone());
        command.push("org.apache.zookeeper.server.quorum.QuorumPeerMain".into());
        let supervisor = Supervisor::start(|folder| {
            command.push(folder.join("zoo.cfg").into());
            command
        })
        .map_err(failed)?;
        let local = Local { address: format!("127.0.0.1:{port}"), supervisor };
        std::fs::write(local.config_file(), local.config(port)).map_err(failed)?;
        local.supervisor.run().map_err(failed)?;
        Ok(local)
    }

    /// Kills the server, as a crash would. Its data stay.
    pub(crate) fn kill(&self) -> std::io::Result<()> {
        self.supervisor.kill()
    }

    /// Runs it again.
    pub(crate) async fn run(&self) -> std::io::Result<()> {
        self.supervisor.run()?;
        self.wait_until_ready().await.map_err(std::io::Error::other)
    }

    /// The error is the end of the server's log.
    async fn wait_until_ready(&self) -> Result<(), String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            sleep(Duration::from_millis(50)).await;
            // Another server could have taken the port: ours says which folder is its.
            let config = server::four_letter_word(&self.address, "conf").await.unwrap_or_default();
            if config.contains(&*self.supervisor.folder().to_string_lossy()) {
                return Ok(());
            }
            let log = std::fs::read_to_string(self.supervisor.folder().join("log")).unwrap_or_default();
            let ended = ["exiting abnormally", "Exception in thread \"main\"", "Error: ", "not found"];
            if ended.iter().any(|sign| log.contains(sign)) || Instant::now() > deadline {
                let from = log.len().saturating_sub(2000);
                return Err(String::from_utf8_lossy(&log.as_bytes()[from..]).into_owned());
            }
        }
    }

    fn config_file(&self) -> PathBuf {
        self.supervisor.folder().join("zoo.cfg")
    }

    fn config(&self, port: u16) -> String {
        let mut config = format!(
            "dataDir={}\nclientPort={port}\nclientPortAddress=127.0.0.1\n",
            self.supervisor.folder().join("data").display()
        );
        for Setting { key, value, .. } in settings() {
            config += &format!("{key}={value}\n");
        }
        config
    }
}

struct Installation {
    place: PathBuf,
    class_path: OsString,
}

fn find_java(environment: &Environment) -> Result<PathBuf, String> {
    let of_java_home = environment.java_home.iter().map(|home| home.join("bin"));
    of_java_home
        .chain(std::env::split_paths(&environment.path))
        .map(|folder| folder.join("java"))
        .find(|java| java.is_file())
        .ok_or_else(|| "there is no `java` on the PATH or in JAVA_HOME".into())
}

fn find_jars(environment: &Environment) -> Result<Installation, String> {
    let (place, found) = match &environment.home {
        // With its configuration of logging.
        Some(home) => (home, [vec![home.join("conf")], jars_in(home), jars_in(&home.join("lib"))].concat()),
        None => (&environment.debian_jars, debian_jars(&environment.debian_jars)),
    };
    let of_server = |jar: &PathBuf| jar.file_name().is_some_and(|name| name.to_string_lossy().starts_with("zookeeper"));
    if !found.iter().any(of_server) {
        return Err(match &environment.home {
            Some(home) => format!("ZOOKEEPER_HOME is {}, which has no lib/zookeeper*.jar", home.display()),
            None => format!(
                "ZOOKEEPER_HOME is not set and Debian's {}/zookeeper.jar is not there",
                environment.debian_jars.display()
            ),
        });
    }
    let class_path = std::env::join_paths(&found).map_err(|error| format!("a path of jars: {error}"))?;
    Ok(Installation { place: place.clone(), class_path })
}

fn jars_in(folder: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    files.filter(|file| file.extension().is_some_and(|extension| extension == "jar")).collect()
}

/// What a server loads of Debian's jars. All of the folder would bring several bindings of slf4j.
fn debian_jars(folder: &Path) -> Vec<PathBuf> {
    const JARS: [&str; 14] = [
        "zookeeper",
        "zookeeper-jute",
        "slf4j-api",
        "slf4j-simple",
        "netty-handler",
        "netty-transport",
        "netty-transport-native-unix-common",
        "netty-transport-native-epoll",
        "netty-common",
        "netty-buffer",
        "netty-codec",
        "netty-resolver",
        "snappy-java",
        "metrics-core",
    ];
    JARS.iter().map(|jar| folder.join(format!("{jar}.jar"))).filter(|jar| jar.is_file()).collect()
}

/// A port of the loopback that is free right now.
pub(crate) async fn free_port() -> Result<u16, String> {
    let listener = TcpListener::bind("127.0.0.1:0").await;
    let address = listener.and_then(|listener| listener.local_addr());
    address.map(|address| address.port()).map_err(|error| format!("no free port on the loopback: {error}"))
}
