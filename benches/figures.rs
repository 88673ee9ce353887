//! The figures of the README, each beside its reference in one run.
//!
//! ```text
//! cargo bench --bench figures
//! cargo bench --bench figures -- --json
//! cargo bench --bench figures -- --short
//! ```
//!
//! Times over a wire are taken through the project's proxy with a round trip of 10 ms, which no busy machine hides.
//! What is quoted is always a ratio to what the raw client, its own lock, or the same figure at another size took in
//! the same run. `--short` only shows that everything runs.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use clap::Parser;
use futures::future::{join_all, try_join_all};
use tokio::task::JoinHandle;
use zklock::zookeeper::{Acls, Client, CreateMode, LockPrefix};
use zklock::{LockError, Mutex, MutexGuard, Naming, Options};
use zklock_support::{Proxy, Server, Space};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Measure zklock beside the raw client, in one run on one server.
#[derive(Parser)]
#[command(name = "figures")]
struct Args {
    /// Few repetitions: to see that it runs, not how fast.
    #[arg(long)]
    short: bool,
    /// Print a JSON object for each figure besides.
    #[arg(long)]
    json: bool,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Half of the round trip of 10 ms.
const ONE_WAY: Duration = Duration::from_millis(5);
const SESSION: Duration = Duration::from_secs(60);

struct Figure {
    what: String,
    value: f64,
    unit: &'static str,
    reference: &'static str,
    reference_value: f64,
    /// What the ratio should be: at most, or at least.
    bar: Bar,
}

#[derive(Clone, Copy)]
enum Bar {
    AtMost(f64),
    AtLeast(f64),
    None,
}

impl Figure {
    fn ratio(&self) -> f64 {
        self.value / self.reference_value
    }

    fn verdict(&self) -> String {
        let (text, is_met) = match self.bar {
            Bar::AtMost(bar) => (format!("at most {bar:.2}"), self.ratio() <= bar),
            Bar::AtLeast(bar) => (format!("at least {bar:.2}"), self.ratio() >= bar),
            Bar::None => return String::new(),
        };
        format!("{text}: {}", if is_met { "met" } else { "NOT met" })
    }

    fn row(&self) -> String {
        format!(
            "{:<52} {:>10.2} {:<9} {:>6.2} x  {:<34} {}",
            self.what,
            self.value,
            self.unit,
            self.ratio(),
            self.reference,
            self.verdict()
        )
    }

    fn json(&self) -> String {
        format!(
            r#"{{"what":"{}","value":{:.3},"unit":"{}","reference":"{}","reference_value":{:.3},"ratio":{:.3}}}"#,
            self.what,
            self.value,
            self.unit,
            self.reference,
            self.reference_value,
            self.ratio()
        )
    }
}

#[tokio::main]
async fn main() -> Outcome<()> {
    let args = Args::parse();
    let server = Server::try_shared().await?;
    eprintln!("ZooKeeper {}: {}", server.version().await?, server.describe());
    let mut figures = Vec::new();
    let size = if args.short { Size::SHORT } else { Size::FULL };

    eprintln!("free lock and release, 10 ms round trip");
    figures.extend(free(server, size).await?);
    for depth in size.depths {
        eprintln!("hand-off in a queue of {depth}, 10 ms round trip");
        figures.push(hand_off(server, *depth, size).await?);
    }
    eprintln!("bytes for each hand-off while a queue drains");
    figures.extend(bytes(server, size).await?);
    eprintln!("8 sessions of 8 waiters each");
    figures.push(contended(server, size).await?);
    eprintln!("many waiters of one session");
    figures.extend(many(server, size).await?);

    println!();
    for figure in &figures {
        println!("{}", figure.row());
    }
    if args.json {
        for figure in &figures {
            println!("{}", figure.json());
        }
    }
    Ok(())
}

#[derive(Clone, Copy)]
struct Size {
    cycles: usize,
    depths: &'static [usize],
    hand_offs: usize,
    queues: (usize, usize),
    contended: usize,
    many: (usize, usize),
}

impl Size {
    const FULL: Self = Self {
        cycles: 100,
        depths: &[2, 100, 1000],
        hand_offs: 40,
        queues: (10, 1000),
        contended: 60,
        many: (1000, 10_000),
    };
    const SHORT: Self =
        Self { cycles: 3, depths: &[2, 10], hand_offs: 4, queues: (5, 20), contended: 2, many: (20, 60) };
}

/// A lock that nobody else wants, against the two writes that it cannot do without.
async fn free(server: &Server, size: Size) -> Outcome<Vec<Figure>> {
    let space = server.space("free").await;
    let proxy = Proxy::start(server.connect_string()).await;
    let client = space.connect_through(&proxy, SESSION).await;
    let mutex = Mutex::new(&client, "/ours")?;
    let mode = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
    client.create("/raw", b"", &CreateMode::Persistent.with_acls(Acls::anyone_all())).await?;
    client.create("/theirs", b"", &CreateMode::Persistent.with_acls(Acls::anyone_all())).await?;
    mutex.lock().await?.release().await?;
    proxy.delay(ONE_WAY);
    let (mut ours, mut raw, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
    // In turn, so that all see the same machine.
    for _ in 0..size.cycles {
        let start = Instant::now();
        mutex.lock().await?.release().await?;
        ours.push(start.elapsed());
        let start = Instant::now();
        let (_, sequence) = client.create("/raw/n-", b"", &mode).await?;
        client.delete(&format!("/raw/n-{sequence}"), None).await?;
        raw.push(start.elapsed());
        let start = Instant::now();
        let guard = client.lock(LockPrefix::new_curator("/theirs", "lock-")?, b"", Acls::anyone_all()).await?;
        let path = guard.lock_path().to_owned();
        // Its own release, in its drop, cannot be waited for.
        std::mem::forget(guard);
        client.delete(&path, None).await?;
        theirs.push(start.elapsed());
    }
    let (ours, raw, theirs) = (median_ms(ours), median_ms(raw), median_ms(theirs));
    let figure = |what: &str, value, bar| Figure {
        what: what.to_owned(),
        value,
        unit: "ms",
        reference: "raw create + raw delete",
        reference_value: raw,
        bar,
    };
    Ok(vec![
        figure("free lock + release", ours, Bar::AtMost(1.05)),
        figure("the same with zookeeper-client's own lock", theirs, Bar::None),
    ])
}

/// From the call of `release` to the next guard in another session.
async fn hand_off(server: &Server, depth: usize, size: Size) -> Outcome<Figure> {
    let space = server.space("hand-off").await;
    let proxy = Proxy::start(server.connect_string()).await;
    let clients = join_all((0..10).map(|_| space.connect_through(&proxy, SESSION))).await;
    let mut ours = Vec::new();
    // A short queue is formed several times.
    for _ in 0..size.hand_offs.div_ceil(depth).min(10) {
        proxy.delay(Duration::ZERO);
        let mut queue = Queue::form(&space, &clients, depth, Options::default()).await?;
        proxy.delay(ONE_WAY);
        for _ in 0..depth.min(size.hand_offs) {
            // What was under way has to come to rest: the clock of a hand-off runs alone.
            tokio::time::sleep(Duration::from_millis(50)).await;
            let time;
            (time, queue) = queue.pass_on().await?;
            ours.push(time);
        }
        proxy.delay(Duration::ZERO);
        queue.drain().await?;
    }
    proxy.delay(ONE_WAY);
    let mode = CreateMode::Ephemeral.with_acls(Acls::anyone_all());
    let mut raw = Vec::new();
    for _ in 0..size.hand_offs {
        clients[0].create("/raw", b"", &mode).await?;
        let (_, _, watcher) = clients[1].get_and_watch_data("/raw").await?;
        let start = Instant::now();
        let (deleted, _) = tokio::join!(clients[0].delete("/raw", None), async {
            watcher.changed().await;
            raw.push(start.elapsed());
        });
        deleted?;
    }
    Ok(Figure {
        what: format!("hand-off in a queue of {depth}"),
        value: median_ms(ours),
        unit: "ms",
        reference: "raw delete -> event at another",
        reference_value: median_ms(raw),
        bar: Bar::AtMost(1.15),
    })
}

/// What the server sends for each hand-off, and for all of an acquisition, at two lengths of the queue.
async fn bytes(server: &Server, size: Size) -> Outcome<Vec<Figure>> {
    let (mut hand_off, mut cycle) = (Vec::new(), Vec::new());
    for length in [size.queues.0, size.queues.1] {
        let space = server.space("bytes").await;
        let proxy = Proxy::start(server.connect_string()).await;
        let clients = join_all((0..10).map(|_| space.connect_through(&proxy, SESSION))).await;
        let bytes_each = |before| proxy.traffic().since(&before).down_bytes as f64 / length as f64;
        let queue = Queue::form(&space, &clients, length, Options::default()).await?;
        let before = proxy.traffic();
        queue.drain().await?;
        hand_off.push(bytes_each(before));
        let before = proxy.traffic();
        Queue::form(&space, &clients, length, Options::default().naming(Naming::Compact)).await?.drain().await?;
        cycle.push(bytes_each(before));
    }
    let figure = |what: &str, values: &[f64]| Figure {
        what: format!("bytes for {what}, {} waiters", size.queues.1),
        value: values[1],
        unit: "bytes",
        reference: "itself with few waiters",
        reference_value: values[0],
        bar: Bar::AtMost(1.2),
    };
    Ok(vec![figure("a hand-off", &hand_off), figure("a whole cycle, Naming::Compact", &cycle)])
}

/// 8 sessions of 8 waiters each, who hold for nothing and come again.
async fn contended(server: &Server, size: Size) -> Outcome<Figure> {
    let space = server.space("contended").await;
    let clients = join_all((0..8).map(|_| space.connect_with(SESSION))).await;
    space.admin().create("/theirs", b"", &CreateMode::Persistent.with_acls(Acls::anyone_all())).await?;
    let start = Instant::now();
    try_join_all((0..64).map(|i| {
        let client = clients[i % 8].clone();
        async move {
            let mutex = Mutex::new(client, "/ours")?;
            for _ in 0..size.contended {
                mutex.lock().await?.release().await?;
            }
            Outcome::Ok(())
        }
    }))
    .await?;
    let ours = start.elapsed();
    let start = Instant::now();
    try_join_all((0..64).map(|i| {
        let client = &clients[i % 8];
        async move {
            for _ in 0..size.contended {
                drop(client.lock(LockPrefix::new_curator("/theirs", "lock-")?, b"", Acls::anyone_all()).await?);
            }
            Outcome::Ok(())
        }
    }))
    .await?;
    let theirs = start.elapsed();
    let per_second = |time: Duration| (64 * size.contended) as f64 / time.as_secs_f64();
    Ok(Figure {
        what: "grants a second, 8 sessions of 8 waiters".into(),
        value: per_second(ours),
        unit: "/s",
        reference: "zookeeper-client's own lock",
        reference_value: per_second(theirs),
        bar: Bar::AtLeast(1.0),
    })
}

/// One session with many waiters: what each costs, at two numbers of them.
async fn many(server: &Server, size: Size) -> Outcome<Vec<Figure>> {
    let mut enqueue = Vec::new();
    let mut drain = Vec::new();
    let mut memory = Vec::new();
    for count in [size.many.0, size.many.1] {
        let space = server.space("many").await;
        let client = space.connect_with(SESSION).await;
        let mutex = Mutex::new(&client, "/ours")?;
        let gate = mutex.lock().await?;
        let (before, start) = (resident_bytes(), Instant::now());
        let waiters: Vec<_> = (0..count)
            .map(|_| {
                let mutex = mutex.clone();
                tokio::spawn(async move { mutex.lock().await?.release().await.map_err(|_| lost()) })
            })
            .collect();
        while space.admin().check_stat("/ours").await?.map_or(0, |stat| stat.num_children) <= count as i32 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        enqueue.push(start.elapsed().as_secs_f64() * 1e6 / count as f64);
        tokio::time::sleep(Duration::from_secs(1)).await;
        memory.push(resident_bytes().saturating_sub(before) as f64 / count as f64 / 1024.0);
        let start = Instant::now();
        gate.release().await?;
        for waiter in waiters {
            waiter.await??;
        }
        drain.push(start.elapsed().as_secs_f64() * 1e6 / count as f64);
    }
    let figure = |what: &str, values: &[f64]| Figure {
        what: format!("{what}, {} waiters of one session", size.many.1),
        value: values[1],
        unit: "us each",
        reference: "itself with a tenth of them",
        reference_value: values[0],
        bar: Bar::AtMost(1.5),
    };
    Ok(vec![
        figure("enqueue", &enqueue),
        figure("drain", &drain),
        Figure {
            what: format!("memory, {} waiters of one session", size.many.1),
            value: memory[1],
            unit: "KiB each",
            reference: "8 KiB",
            reference_value: 8.0,
            bar: Bar::AtMost(1.0),
        },
    ])
}

fn lost() -> LockError {
    LockError::RuntimeShutdown { path: "/ours".into() }
}

/// Of this process, or nothing where the system does not tell.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096
}

/// A formed queue: its holder, and the waiters in the order in which they will be granted.
struct Queue {
    holder: MutexGuard,
    waiters: VecDeque<JoinHandle<Result<(Instant, MutexGuard), LockError>>>,
}

impl Queue {
    /// Neighbours are of different sessions, and in the order of their enqueueing.
    async fn form(space: &Space<'_>, clients: &[Client], length: usize, options: Options) -> Outcome<Self> {
        let holder = Mutex::with_options(&clients[0], "/ours", options.clone())?.lock().await?;
        let mut waiters = VecDeque::new();
        for position in 1..=length {
            let mutex = Mutex::with_options(&clients[position % clients.len()], "/ours", options.clone())?;
            waiters.push_back(tokio::spawn(async move {
                let guard = mutex.lock().await?;
                Ok((Instant::now(), guard))
            }));
            while space.admin().check_stat("/ours").await?.map_or(0, |stat| stat.num_children) <= position as i32 {
                tokio::task::yield_now().await;
            }
        }
        // The last of them have to find whom to wait for.
        tokio::time::sleep(Duration::from_millis(500)).await;
        Ok(Self { holder, waiters })
    }

    /// The holder releases; how long it took until the next one held. The last holder is kept.
    async fn pass_on(self) -> Outcome<(Duration, Self)> {
        let Self { holder, mut waiters } = self;
        let Some(next) = waiters.pop_front() else { return Err("nobody waits".into()) };
        let start = Instant::now();
        let release = tokio::spawn(holder.release());
        let (granted, holder) = next.await??;
        release.await??;
        Ok((granted - start, Self { holder, waiters }))
    }

    async fn drain(mut self) -> Outcome<()> {
        while !self.waiters.is_empty() {
            (_, self) = self.pass_on().await?;
        }
        Ok(self.holder.release().await?)
    }
}

fn median_ms(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times.get(times.len() / 2).map_or(f64::NAN, |time| time.as_secs_f64() * 1e3)
}
