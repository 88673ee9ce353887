//! Sees to it that nothing is left: no container, no process, no folder. The work is done by
//! `supervisor.sh`, a process that notices our death as the end of a pipe. Here are its other end and
//! the moments at which we wait for it: when a server is dropped, at exit, and on a signal.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant};

use tokio::signal::unix::{SignalKind, signal};

use crate::background::{lock, runtime, say};
use crate::space;

/// How long we wait for the supervisor to clear away. It goes on without us.
const PATIENCE: Duration = Duration::from_secs(30);

/// The supervisor of one server. Dropping it ends the server and waits until all of it is gone.
pub(crate) struct Supervisor {
    folder: PathBuf,
    label: String,
    link: Arc<Mutex<Link>>,
}

impl Supervisor {
    /// Starts a supervisor. `command` makes of its folder the command of a local server, if it is to
    /// run one.
    pub(crate) fn start(command: impl FnOnce(&Path) -> Vec<OsString>) -> io::Result<Supervisor> {
        clear_away_at_the_end();
        let name = unique_name();
        let folder = std::env::temp_dir().join(&name);
        let label = format!("{LABEL}={}", folder.display());
        let mut child = Command::new("sh")
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/src/supervisor.sh"))
            .arg(&folder)
            .arg(&label)
            .args(command(&folder))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        let orders = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?);
        let link = Arc::new(Mutex::new(Link::Open { child, orders, answers }));
        lock(&LINKS).push(Arc::clone(&link));
        // Only now, so that there is no moment at which nobody would remove it.
        std::fs::create_dir(&folder)?;
        Ok(Supervisor { folder, label, link })
    }

    /// A folder of the server's own, removed with it.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Key and value of the label of containers that are removed.
    pub(crate) fn label(&self) -> (&str, &str) {
        self.label.split_once('=').expect("a label of this form")
    }

    /// Runs the local server.
    pub(crate) fn run(&self) -> io::Result<()> {
        self.order("run")
    }

    /// Kills the local server, as a crash would.
    pub(crate) fn kill(&self) -> io::Result<()> {
        self.order("kill")
    }

    /// From now on a container may appear that is to be removed ...
    pub(crate) fn creating(&self) -> io::Result<()> {
        self.order("creating")
    }

    /// ... and from now on it has, or never will.
    pub(crate) fn created(&self) -> io::Result<()> {
        self.order("created")
    }

    fn order(&self, order: &str) -> io::Result<()> {
        match &mut *lock(&self.link) {
            Link::Open { orders: Some(orders), answers, .. } => {
                writeln!(orders, "{order}")?;
                let mut answer = String::new();
                answers.read_line(&mut answer)?;
                if answer.is_empty() { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
            }
            _ => Err(io::Error::other("the server is being removed")),
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        clear_away(&[Arc::clone(&self.link)]);
        lock(&LINKS).retain(|link| !Arc::ptr_eq(link, &self.link));
    }
}

const LABEL: &str = "zklock.test";

static LINKS: Mutex<Vec<Arc<Mutex<Link>>>> = Mutex::new(Vec::new());

enum Link {
    Open { child: Child, orders: Option<ChildStdin>, answers: BufReader<ChildStdout> },
    Closed,
}

fn unique_name() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    format!("zklock-{}-{}-{:x}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed), now.as_micros())
}

/// Ends the given supervisors' servers, all at the same time, and waits for it.
fn clear_away(links: &[Arc<Mutex<Link>>]) {
    for link in links {
        if let Link::Open { orders, .. } = &mut *lock(link) {
            *orders = None;
        }
    }
    let deadline = Instant::now() + PATIENCE;
    for link in links {
        let mut link = lock(link);
        if let Link::Open { child, .. } = &mut *link {
            match wait_until(child, deadline) {
                Some(true) => {}
                Some(false) => say(format_args!("zklock-support: a container could not be removed; see: docker ps -a")),
                None => say(format_args!("zklock-support: still removing a server, in the background")),
            }
            *link = Link::Closed;
        }
    }
}

/// Whether the child ended well, if it ended.
fn wait_until(child: &mut Child, deadline: Instant) -> Option<bool> {
    while Instant::now() < deadline {
        match child.try_wait() {
            Ok(None) => std::thread::sleep(Duration::from_millis(5)),
            Ok(Some(status)) => return Some(status.success()),
            Err(_) => return Some(false),
        }
    }
    None
}

/// Clears everything away at exit and on a signal.
pub(crate) fn clear_away_at_the_end() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        at_exit(clear_everything_away);
        runtime().spawn(async {
            // Whoever sent the signal expects this process to end. The default action would do that
            // at once and leave the clearing away to go on after us.
            let status = 128 + next_signal().await;
            let all = tokio::task::spawn_blocking(clear_everything_away);
            let _ = all.await;
            std::process::exit(status);
        });
    });
}

fn clear_everything_away() {
    space::remove_all();
    let links = lock(&LINKS).clone();
    clear_away(&links);
}

async fn next_signal() -> i32 {
    let listen = |kind: SignalKind| async move {
        match signal(kind) {
            Ok(mut signal) => signal.recv().await,
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        _ = listen(SignalKind::interrupt()) => SignalKind::interrupt().as_raw_value(),
        _ = listen(SignalKind::terminate()) => SignalKind::terminate().as_raw_value(),
    }
}

/// Rust runs no destructors of statics; C's hook is what runs after libtest's last word.
#[allow(unsafe_code)]
fn at_exit(hook: fn()) {
    static HOOK: std::sync::OnceLock<fn()> = std::sync::OnceLock::new();
    extern "C" fn run() {
        if let Some(hook) = HOOK.get() {
            // A panic must not unwind into C.
            let _ = std::panic::catch_unwind(hook);
        }
    }
    if HOOK.set(hook).is_ok() {
        // SAFETY: `run` is a plain function that takes nothing and lives as long as the process.
        unsafe { libc::atexit(run) };
    }
}
