//! Where a server comes from: the three ways, their order, and what is said when all of them fail.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use crate::server::Server;
use crate::{container, local};

/// No server could be found or started. Names the three ways to one, and why each failed.
#[derive(Clone, Debug, thiserror::Error)]
pub struct ServerError {
    given: String,
    container: String,
    local: String,
}

impl fmt::Display for ServerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "no ZooKeeper server to work with. There are three ways to one:")?;
        writeln!(f, "  1. A server that runs already, with ZOOKEEPER_CONNECT=host:port.")?;
        writeln!(f, "     Here: {}.", self.given)?;
        writeln!(f, "  2. Docker: a container is started, of ZOOKEEPER_IMAGE if set.")?;
        writeln!(f, "     Here: {}.", self.container)?;
        writeln!(f, "  3. java, and ZooKeeper as Debian's package `zookeeper` or unpacked at ZOOKEEPER_HOME.")?;
        write!(f, "     Here: {}.", self.local)
    }
}

/// What decides where a server comes from.
#[derive(Clone, Debug, Default)]
pub(crate) struct Environment {
    /// `ZOOKEEPER_CONNECT`
    pub(crate) connect: Option<String>,
    /// `ZOOKEEPER_IMAGE`
    pub(crate) image: Option<String>,
    /// `ZOOKEEPER_HOME`
    pub(crate) home: Option<PathBuf>,
    /// `JAVA_HOME`
    pub(crate) java_home: Option<PathBuf>,
    /// `PATH`
    pub(crate) path: OsString,
    /// Where Debian's packages put their jars.
    pub(crate) debian_jars: PathBuf,
}

impl Environment {
    pub(crate) fn of_process() -> Environment {
        // An empty variable is as good as none: that is how CI files unset one.
        let text = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        Environment {
            connect: text("ZOOKEEPER_CONNECT"),
            image: text("ZOOKEEPER_IMAGE"),
            home: text("ZOOKEEPER_HOME").map(PathBuf::from),
            java_home: text("JAVA_HOME").map(PathBuf::from),
            path: std::env::var_os("PATH").unwrap_or_default(),
            debian_jars: PathBuf::from("/usr/share/java"),
        }
    }

    /// The ways to try, in order. What was asked for by name is tried alone: to fall back to
    /// something else would test something else.
    pub(crate) fn ways(&self) -> Vec<Way> {
        match (&self.connect, &self.image) {
            (Some(connect), _) => vec![Way::Given(connect.clone())],
            (None, Some(image)) => vec![Way::Container(Some(image.clone()))],
            (None, None) => vec![Way::Container(None), Way::Local],
        }
    }
}

/// One way to a server.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Way {
    /// One that runs, at this connect string.
    Given(String),
    /// A container, of this image or of the first that can be had.
    Container(Option<String>),
    /// A child process.
    Local,
}

/// How a server that we start is to be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Keeping {
    /// It runs once, as fast as it can: its data are in memory if that is easy.
    Nothing,
    /// Its data and port survive that it is stopped and started.
    DataAndPort,
}

/// Finds or starts a server.
pub(crate) async fn find(environment: &Environment, keeping: Keeping) -> Result<Server, ServerError> {
    let mut error = ServerError {
        given: "it is not set".into(),
        container: "not tried, because ZOOKEEPER_CONNECT is set".into(),
        local: match environment.connect {
            Some(_) => "not tried, because ZOOKEEPER_CONNECT is set".into(),
            None => "not tried, because ZOOKEEPER_IMAGE is set".into(),
        },
    };
    for way in environment.ways() {
        let (found, why) = match way {
            Way::Given(connect) => (Server::given(&connect).await, &mut error.given),
            Way::Container(image) => (container::start(image.as_deref(), keeping).await, &mut error.container),
            Way::Local => (local::start(environment, keeping).await, &mut error.local),
        };
        match found {
            Ok(server) => return Ok(server),
            Err(failure) => *why = failure.trim_end_matches(['.', '?']).to_owned(),
        }
    }
    Err(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(value: &str) -> Option<String> {
        Some(value.into())
    }

    #[test]
    fn a_container_comes_before_a_local_installation() {
        assert_eq!(Environment::default().ways(), [Way::Container(None), Way::Local]);
    }

    #[test]
    fn what_is_asked_for_by_name_is_tried_alone() {
        let image = Environment { image: set("zookeeper:3.8"), ..Default::default() };
        assert_eq!(image.ways(), [Way::Container(set("zookeeper:3.8"))]);
        let both = Environment { connect: set("zoo:2181"), ..image };
        assert_eq!(both.ways(), [Way::Given("zoo:2181".into())]);
    }

    #[tokio::test]
    async fn the_error_names_the_three_ways_and_why_each_failed() {
        let environment = Environment { connect: set("127.0.0.1:1"), ..Default::default() };
        let error = find(&environment, Keeping::Nothing).await.err().unwrap().to_string();
        for part in ["ZOOKEEPER_CONNECT=host:port", "127.0.0.1:1 does not answer", "Docker", "java", "ZOOKEEPER_HOME"] {
            assert!(error.contains(part), "{part} is not in: {error}");
        }
    }

    #[tokio::test]
    async fn without_java_the_local_way_says_what_is_missing() {
        let nothing = Environment::default();
        let why = local::start(&nothing, Keeping::Nothing).await.err().unwrap();
        assert!(why.contains("java"), "{why}");
    }
}
