//! A server in a container.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use testcontainers::bollard::models::{HostConfig, PortBinding};
use testcontainers::core::{ContainerPort, IntoContainerPort, Mount};
use testcontainers::runners::AsyncRunner;
use testcontainers::{ContainerRequest, GenericImage, ImageExt};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;
use tokio::time::{Instant, sleep, timeout};

use crate::background::say;
use crate::find::Keeping;
use crate::local::free_port;
use crate::server::{CONTAINER_CHECKS, Server, answers, settings};
use crate::supervisor::Supervisor;

const OFFICIAL: &str = "zookeeper:3.9";
const OURS: &str = "zklock-zookeeper:3.9";
const PORT: ContainerPort = ContainerPort::Tcp(2181);

/// How long a server may take to answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// A container, which can be killed and run again.
pub(crate) struct Container {
    id: String,
    address: String,
    _supervisor: Supervisor,
}

/// Starts a container of the image, or of the first that can be had. The error says why not.
pub(crate) async fn start(image: Option<&str>, keeping: Keeping) -> Result<Server, String> {
    docker_answers().await?;
    let image = match image {
        Some(image) => have(image).await?,
        None => have_any().await?,
    };
    let mut failure = String::new();
    // A port that was free may be taken by the time the engine wants it.
    for _ in 0..3 {
        match Container::start(&image, keeping).await {
            Ok(container) => {
                return Ok(Server::container(&container.address.clone(), format!("container {image}"), container));
            }
            Err(error) => failure = format!("a container of {image} does not work: {error}"),
        }
        if keeping == Keeping::Nothing {
            break;
        }
    }
    Err(failure)
}

impl Container {
    async fn start(image: &str, keeping: Keeping) -> Result<Container, String> {
        let text = |error: io::Error| error.to_string();
        let supervisor = Supervisor::start(|_| Vec::new()).map_err(text)?;
        let request = request(image, keeping, supervisor.label()).await?;
        supervisor.creating().map_err(text)?;
        let started = request.start().await;
        supervisor.created().map_err(text)?;
        let started = started.map_err(|error| error.to_string())?;
        let port = started.get_host_port_ipv4(PORT).await.map_err(|error| error.to_string())?;
        let host = started.get_host().await.map_err(|error| error.to_string())?.to_string();
        let host = if host == "localhost" { "127.0.0.1".to_owned() } else { host };
        let container =
            Container { id: started.id().to_owned(), address: format!("{host}:{port}"), _supervisor: supervisor };
        // To remove it is the supervisor's business, which does so in the end whatever becomes of us.
        std::mem::forget(started);
        container.wait_until_ready().await.map_err(text)?;
        Ok(container)
    }

    /// Kills the server, as a crash would. Its data stay.
    pub(crate) async fn kill(&self) -> io::Result<()> {
        docker(&["kill", &self.id]).await.map(drop)
    }

    /// Runs it again.
    pub(crate) async fn run(&self) -> io::Result<()> {
        docker(&["start", &self.id]).await?;
        self.wait_until_ready().await
    }

    async fn wait_until_ready(&self) -> io::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !answers(&self.address).await {
            let state = docker(&["inspect", "--format", "{{.State.Running}}", &self.id]).await?;
            if state.trim() != "true" || Instant::now() > deadline {
                let log = docker_with_stderr(&["logs", "--tail", "20", &self.id]).await.unwrap_or_default();
                return Err(io::Error::other(format!("it ended, or did not answer; its log ends so:\n{log}")));
            }
            sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }
}

async fn request(image: &str, keeping: Keeping, label: (&str, &str)) -> Result<ContainerRequest<GenericImage>, String> {
    let (name, tag) = name_and_tag(image);
    let host_port = match keeping {
        Keeping::Nothing => 0,
        // The engine gives a container another free port each time it is started.
        Keeping::DataAndPort => free_port().await?,
    };
    let mut request = GenericImage::new(name, tag)
        .with_exposed_port(2181.tcp())
        .with_label(label.0, label.1)
        .with_startup_timeout(PATIENCE)
        .with_host_config_modifier(move |config| publish(config, host_port));
    if keeping == Keeping::Nothing {
        request = request.with_mount(Mount::tmpfs_mount("/data")).with_mount(Mount::tmpfs_mount("/datalog"));
    }
    let mut extra = Vec::new();
    for setting in settings() {
        match setting.variable {
            Some(variable) => request = request.with_env_var(variable, setting.value),
            None => extra.push(format!("{}={}", setting.key, setting.value)),
        }
    }
    Ok(request.with_env_var("ZOO_CFG_EXTRA", extra.join(" ")).with_env_var("JVMFLAGS", CONTAINER_CHECKS))
}

/// Publishes the port on the loopback alone, where the engine is on this machine.
fn publish(config: &mut HostConfig, host_port: u16) {
    let remote = std::env::var("DOCKER_HOST").is_ok_and(|host| host.starts_with("tcp://"));
    let host_ip = if remote { None } else { Some("127.0.0.1".to_owned()) };
    let binding = PortBinding { host_ip, host_port: Some(host_port.to_string()) };
    config.publish_all_ports = Some(false);
    config.port_bindings = Some(HashMap::from([(PORT.to_string(), Some(vec![binding]))]));
}

/// An image of the name, which was asked for.
async fn have(image: &str) -> Result<String, String> {
    let of_ours = match image {
        OURS => Some("trixie"),
        "zklock-zookeeper:3.8" => Some("bookworm"),
        _ => None,
    };
    if present(image).await {
        return Ok(image.to_owned());
    }
    match of_ours {
        Some(suite) => build(suite).await?,
        None => pull(image)
            .await
            .map_err(|why| format!("ZOOKEEPER_IMAGE={image} is not there and cannot be pulled: {why}"))?,
    }
    Ok(image.to_owned())
}

/// The official image, or ours.
async fn have_any() -> Result<String, String> {
    for image in [OFFICIAL, OURS] {
        if present(image).await {
            return Ok(image.to_owned());
        }
    }
    if let Err(why) = pull(OFFICIAL).await {
        say(format_args!("zklock-support: {OFFICIAL} cannot be pulled ({why})"));
        build("trixie").await?;
        return Ok(OURS.to_owned());
    }
    Ok(OFFICIAL.to_owned())
}

async fn present(image: &str) -> bool {
    docker(&["image", "inspect", image]).await.is_ok()
}

/// Pulls an image, unless the registry does not answer soon. The error is the engine's.
async fn pull(image: &str) -> Result<(), String> {
    say(format_args!("zklock-support: pulling {image}"));
    let mut pull = Command::new("docker")
        .args(["pull", image])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| error.to_string())?;
    // The first line comes once the registry has answered; what follows is only a matter of size.
    let mut progress = BufReader::new(pull.stdout.take().ok_or("no output")?).lines();
    let first = timeout(Duration::from_secs(30), progress.next_line()).await;
    if first.is_err() {
        return Err("the registry does not answer within 30 s".into());
    }
    let rest = async {
        while let Ok(Some(_)) = progress.next_line().await {}
        pull.wait_with_output().await
    };
    match timeout(Duration::from_secs(600), rest).await {
        Err(_) => Err("it takes more than 10 minutes".into()),
        Ok(Err(error)) => Err(error.to_string()),
        Ok(Ok(output)) if output.status.success() => Ok(()),
        Ok(Ok(output)) => Err(last_line(&output.stderr)),
    }
}

/// Builds our image, where anyone watching sees it.
async fn build(suite: &str) -> Result<(), String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docker/build-image.sh");
    let script = script.canonicalize().map_err(|error| format!("{}: {error}", script.display()))?;
    say(format_args!("zklock-support: running {} {suite}", script.display()));
    let mut build = Command::new(&script);
    // Its progress goes to stderr, which is not captured.
    build.arg(suite).stdin(Stdio::null()).stdout(io::stderr());
    build.args(["--for", &std::process::id().to_string()]);
    match build.status().await {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{} failed, {status}; its last words are above", script.display())),
        Err(error) => Err(format!("{}: {error}", script.display())),
    }
}

async fn docker_answers() -> Result<(), String> {
    let version = docker(&["version", "--format", "{{.Server.Version}}"]);
    match timeout(Duration::from_secs(10), version).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => Err("there is no command `docker`".into()),
        Ok(Err(error)) => Err(format!("Docker does not answer: {error}")),
        Err(_) => Err("Docker does not answer within 10 s".into()),
    }
}

/// Runs the engine's command. The error is the last line of what it says.
async fn docker(arguments: &[&str]) -> io::Result<String> {
    let output = Command::new("docker").args(arguments).stdin(Stdio::null()).kill_on_drop(true).output().await?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(io::Error::other(last_line(&output.stderr)))
    }
}

async fn docker_with_stderr(arguments: &[&str]) -> io::Result<String> {
    let output = Command::new("docker").args(arguments).stdin(Stdio::null()).kill_on_drop(true).output().await?;
    Ok(String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

fn last_line(output: &[u8]) -> String {
    let output = String::from_utf8_lossy(output);
    output.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or("it does not say why").to_owned()
}

/// `host:5000/name:tag` has a colon that is not the tag's.
fn name_and_tag(image: &str) -> (&str, &str) {
    match image.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => (name, tag),
        _ => (image, "latest"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tag_is_what_follows_the_last_colon_unless_that_is_a_port() {
        assert_eq!(name_and_tag("zookeeper:3.9"), ("zookeeper", "3.9"));
        assert_eq!(name_and_tag("registry:5000/zookeeper"), ("registry:5000/zookeeper", "latest"));
        assert_eq!(name_and_tag("registry:5000/zookeeper:3.8"), ("registry:5000/zookeeper", "3.8"));
    }
}
