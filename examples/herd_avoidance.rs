//! Shows the herd, and its absence: how many waiters does one release of a lock wake?
//!
//! The textbook's first recipe has every waiter watch the children of the lock's node, so each
//! release wakes all of them, and each asks the server for the whole list again. zklock has every
//! waiter watch one node, the one just before its own, so a release wakes the next holder alone.
//! This example queues the same number of waiters both ways, lets the queue drain, and reads from
//! the *server's* counters (`mntr`) what that cost.
//!
//! ```text
//! cargo run --example herd_avoidance
//! cargo run --example herd_avoidance -- --waiters 200 --sessions 20
//! cargo run --example herd_avoidance -- --svg herd.svg --csv herd.csv
//! ```
//!
//! The last two lines are for machines:
//!
//! ```text
//! herd: woken_per_release=25.5 requests_per_release=26.5 p50_us=2719 p99_us=9206 fifo=yes
//! zklock: woken_per_release=1.0 requests_per_release=2.0 p50_us=893 p99_us=2991 fifo=yes
//! ```
//!
//! With `--svg` or `--csv` it measures queues of 5, 10, 20, 50 and 100 waiters besides.
//! The exit code is 1 if zklock woke more than one waiter per release or broke the queue's order.

mod common;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use tokio::sync::{mpsc, watch};
use zklock::zookeeper::{Acls, Client, CreateMode, Error as ZkError, OneshotWatcher};
use zklock::{Mutex, MutexGuard};
use zklock_support::{Mntr, Server};

use common::{Failure, exit_code, open_session};

/// Measure on the server how many waiters one release of a lock wakes: the naive recipe, where
/// all watch the lock node's children, against zklock.
#[derive(Parser)]
#[command(name = "herd_avoidance")]
struct Args {
    /// Waiters in the queue.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u16).range(2..=1000))]
    waiters: u16,

    /// ZooKeeper sessions that the waiters share, at most one for each waiter.
    #[arg(long, value_name = "S", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=1000))]
    sessions: u16,

    /// Draw woken waiters per release against the queue's length (5, 10, 20, 50, 100) to FILE.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,

    /// Write the figures of those queue lengths to FILE, a row for each run.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
}

/// The queue lengths of `--svg` and `--csv`.
const LENGTHS: [usize; 5] = [5, 10, 20, 50, 100];

/// Where a run takes its waiters' nodes.
const LOCK: &str = "/lock";

/// Long enough for a client to send next to no pings while the queue drains: they count as requests.
const SESSION_TIMEOUT: Duration = Duration::from_secs(40);

/// A lock that nobody takes for this long is stuck.
const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::main]
async fn main() -> ExitCode {
    exit_code("herd_avoidance", run(Args::parse()).await)
}

async fn run(args: Args) -> Result<(), Failure> {
    if args.svg.is_some() && args.svg == args.csv {
        return Err("--svg and --csv name the same file".into());
    }
    let svg = args.svg.map(Output::try_out).transpose()?;
    let csv = args.csv.map(Output::try_out).transpose()?;
    let (waiters, sessions) = (usize::from(args.waiters), usize::from(args.sessions));

    let server = Server::try_shared().await?;
    println!("ZooKeeper: {}", server.describe());
    let mut counters = Counters::new(server).await?;

    let herd = measure(Recipe::Naive, waiters, sessions, &mut counters).await?;
    let zklock = measure(Recipe::Zklock, waiters, sessions, &mut counters).await?;

    let mut rows = Vec::new();
    if svg.is_some() || csv.is_some() {
        for length in LENGTHS {
            for (recipe, measured) in [(Recipe::Naive, &herd), (Recipe::Zklock, &zklock)] {
                rows.push(match length == waiters {
                    true => measured.clone(),
                    false => measure(recipe, length, sessions, &mut counters).await?,
                });
            }
        }
    }
    if let Some(file) = csv {
        file.write(&csv_of(&rows))?;
    }
    if let Some(file) = svg {
        file.write(&picture_of(&rows)?)?;
    }

    println!("\n{}", table(&herd, &zklock));
    if !counters.undisturbed {
        println!(
            "\nOther clients were at work on this server meanwhile, and its counters include theirs.\n\
             Unset ZOOKEEPER_CONNECT for a server of our own."
        );
    }
    println!("\n{}\n{}", herd.machine_line(), zklock.machine_line());

    let measured_here = rows.iter().filter(|row| row.recipe == Recipe::Zklock);
    let faults: Vec<String> = measured_here.chain([&zklock]).filter_map(Figures::fault).collect();
    match faults.first() {
        None => Ok(()),
        Some(fault) => Err(fault.as_str().into()),
    }
}

// ---------------------------------------------------------------------------------------------
// The recipe that this example warns of
// ---------------------------------------------------------------------------------------------

/// The naive lock: stand in the queue, and look again whenever anything changes in it.
#[derive(Clone)]
struct NaiveLock {
    client: Client,
    looks: Looks,
}

struct NaiveGuard {
    client: Client,
    node: String,
    _watcher: OneshotWatcher,
}

impl NaiveLock {
    async fn lock(&self) -> Result<NaiveGuard, ZkError> {
        let ephemeral = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
        let (_, number) = self.client.create(&format!("{LOCK}/lock-"), b"", &ephemeral).await?;
        let mine = format!("lock-{number}");
        loop {
            let (mut children, _, watcher) = self.client.get_and_watch_children(LOCK).await?;
            children.sort();
            if children.first() == Some(&mine) {
                return Ok(NaiveGuard {
                    client: self.client.clone(),
                    node: format!("{LOCK}/{mine}"),
                    _watcher: watcher,
                });
            }
            self.looks.record(children.len());
            watcher.changed().await;
        }
    }
}

impl NaiveGuard {
    async fn release(self) -> Result<(), ZkError> {
        self.client.delete(&self.node, None).await
    }
}

/// How many waiters saw a queue of each length and went on waiting. It paces the naive run: a
/// holder keeps the lock until the herd that the last release woke has settled down again, as it
/// does wherever the work under the lock takes longer than the wake-ups. Nothing is measured here.
#[derive(Clone, Default)]
struct Looks(watch::Sender<BTreeMap<usize, usize>>);

impl Looks {
    fn record(&self, queue_length: usize) {
        self.0.send_modify(|looks| *looks.entry(queue_length).or_default() += 1);
    }

    fn forget(&self) {
        self.0.send_modify(BTreeMap::clear);
    }

    /// Waits until each of `waiters` has looked at the queue of them and their holder.
    async fn settled(&self, waiters: usize) {
        let looked = |looks: &BTreeMap<usize, usize>| looks.get(&(waiters + 1)).copied();
        let enough = |looks: &BTreeMap<_, _>| looked(looks).unwrap_or(0) >= waiters;
        // The sender is ours, so the channel cannot close.
        let _ = self.0.subscribe().wait_for(enough).await;
    }
}

// ---------------------------------------------------------------------------------------------
// The two recipes behind one face
// ---------------------------------------------------------------------------------------------

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Recipe {
    Naive,
    Zklock,
}

#[derive(Clone)]
enum Lock {
    Naive(NaiveLock),
    Zklock(Mutex),
}

enum Guard {
    Naive(NaiveGuard),
    Zklock(MutexGuard),
}

impl Recipe {
    fn name(self) -> &'static str {
        match self {
            Recipe::Naive => "herd",
            Recipe::Zklock => "zklock",
        }
    }

    fn lock(self, client: &Client, looks: &Looks) -> Result<Lock, Failure> {
        Ok(match self {
            Recipe::Naive => Lock::Naive(NaiveLock { client: client.clone(), looks: looks.clone() }),
            Recipe::Zklock => Lock::Zklock(Mutex::new(client.clone(), LOCK)?),
        })
    }
}

impl Lock {
    async fn lock(&self) -> Result<Guard, Failure> {
        Ok(match self {
            Lock::Naive(lock) => Guard::Naive(lock.lock().await?),
            Lock::Zklock(lock) => Guard::Zklock(lock.lock().await?),
        })
    }
}

impl Guard {
    fn sequence(&self) -> Option<i64> {
        match self {
            Guard::Naive(guard) => sequence(&guard.node),
            Guard::Zklock(guard) => sequence(guard.node()),
        }
    }

    async fn release(self) -> Result<(), Failure> {
        match self {
            Guard::Naive(guard) => guard.release().await?,
            Guard::Zklock(guard) => guard.release().await?,
        }
        Ok(())
    }
}

/// The number that the server gave a sequential node: the digits at its name's end.
fn sequence(node: &str) -> Option<i64> {
    node.rsplit('-').next()?.parse().ok()
}

// ---------------------------------------------------------------------------------------------
// One run
// ---------------------------------------------------------------------------------------------

/// A waiter that has been given the lock.
struct Turn {
    guard: Guard,
    granted: Instant,
}

/// Queues `waiters` behind a gate, opens it, and lets each take the lock once and pass it on.
async fn measure(recipe: Recipe, waiters: usize, sessions: usize, counters: &mut Counters) -> Result<Figures, Failure> {
    let sessions = sessions.min(waiters);
    let mut progress = Progress::new(format!("{}: {waiters} waiters, {sessions} sessions", recipe.name()));
    let space = counters.server.space(recipe.name()).await;
    let address = space.connect_string();

    let observer = open_session(&address, SESSION_TIMEOUT).await?;
    let mut clients = Vec::new();
    for _ in 0..sessions {
        clients.push(open_session(&address, SESSION_TIMEOUT).await?);
    }
    if recipe == Recipe::Naive {
        let persistent = CreateMode::Persistent.with_acls(Acls::anyone_all());
        observer.create(LOCK, b"", &persistent).await?;
    }

    let looks = Looks::default();
    let gate = recipe.lock(&observer, &looks)?.lock().await?;
    let mut order = vec![gate.sequence()];
    let (turns, mut next_turn) = mpsc::unbounded_channel();
    for waiter in 0..waiters {
        let lock = recipe.lock(&clients[waiter % sessions], &looks)?;
        let turns = turns.clone();
        tokio::spawn(async move {
            let turn = lock.lock().await.map(|guard| Turn { guard, granted: Instant::now() });
            // Nobody listens any more once another waiter has failed.
            let _ = turns.send(turn);
        });
        // One after another, so that neighbours in the queue belong to different sessions.
        let queued = async { queue_of(&observer, waiter + 2).await };
        tokio::time::timeout(PATIENCE, queued).await.map_err(|_| "a waiter did not join the queue")??;
        progress.show(&format!("{} queued", waiter + 1));
    }
    drop(turns);

    let before = counters.when_quiet().await?;
    looks.forget();
    let mut released = Instant::now();
    gate.release().await?;
    let mut hand_offs = Vec::with_capacity(waiters);
    let mut overlapped = false;
    let mut drained = None;
    for behind in (0..waiters).rev() {
        let turn = tokio::time::timeout(PATIENCE, next_turn.recv()).await;
        let turn = turn.map_err(|_| format!("{}: nobody was given the lock for {PATIENCE:?}", recipe.name()))?;
        let Turn { guard, granted } = turn.ok_or("a waiter ended without a word")??;
        overlapped |= granted < released;
        hand_offs.push(granted.saturating_duration_since(released));
        order.push(guard.sequence());
        if recipe == Recipe::Naive {
            looks.settled(behind).await;
        }
        if behind == 0 {
            drained = Some(counters.when_quiet().await?);
        }
        released = Instant::now();
        guard.release().await?;
        progress.show(&format!("{} handed over", waiters - behind));
    }
    let drained = drained.ok_or("a queue has at least one waiter")?;
    let last = counters.when_quiet().await?;
    progress.done();

    hand_offs.sort();
    Ok(Figures {
        recipe,
        waiters,
        sessions,
        drain: drained.since(&before, counters.own_cost),
        last_release: last.since(&drained, counters.own_cost),
        hand_offs,
        in_order: !overlapped && rises(&order),
    })
}

/// Waits until `length` nodes stand in the queue.
async fn queue_of(observer: &Client, length: usize) -> Result<(), Failure> {
    loop {
        let stat = observer.check_stat(LOCK).await?;
        if stat.is_some_and(|stat| usize::try_from(stat.num_children).is_ok_and(|found| found >= length)) {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Whether all are known and each is greater than the one before.
fn rises(order: &[Option<i64>]) -> bool {
    order.iter().all(Option::is_some) && order.is_sorted_by(|earlier, later| earlier < later)
}

// ---------------------------------------------------------------------------------------------
// Counting on the server
// ---------------------------------------------------------------------------------------------

/// The server's counters, read when it has nothing left to do.
struct Counters {
    server: &'static Server,
    readings: u64,
    own_cost: Packets,
    undisturbed: bool,
}

/// What reading the counters once adds to them.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Packets {
    received: u64,
    sent: u64,
}

/// One reading, and the how-manieth it is.
struct Reading {
    mntr: Mntr,
    number: u64,
}

/// Events that the server has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    packets_received: u64,
    packets_sent: u64,
    data_watches: u64,
    deletion_watches: u64,
    children_watches: u64,
}

impl Counters {
    /// How long the server must have been left alone, and how long we wait for that.
    const QUIET: Duration = Duration::from_millis(40);
    const NOT_QUIET_AFTER: Duration = Duration::from_secs(3);

    async fn new(server: &'static Server) -> Result<Counters, Failure> {
        let mut counters = Counters { server, readings: 0, own_cost: Packets::default(), undisturbed: true };
        // The least that lies between two readings is what a reading costs.
        let mut earlier = counters.read().await?;
        let mut costs = Vec::new();
        for _ in 0..5 {
            let later = counters.read().await?;
            let spent = later.since(&earlier, Packets::default());
            costs.push((spent.packets_received, spent.packets_sent));
            earlier = later;
        }
        let (received, sent) = costs.into_iter().min().unwrap_or_default();
        counters.own_cost = Packets { received, sent };
        Ok(counters)
    }

    /// Reads the counters once they no longer move, or after three seconds of waiting for that.
    async fn when_quiet(&mut self) -> Result<Reading, Failure> {
        let started = Instant::now();
        let mut earlier = self.read().await?;
        loop {
            tokio::time::sleep(Self::QUIET).await;
            let later = self.read().await?;
            if later.since(&earlier, self.own_cost) == Counts::default() {
                return Ok(later);
            }
            if started.elapsed() > Self::NOT_QUIET_AFTER {
                self.undisturbed = false;
                return Ok(later);
            }
            earlier = later;
        }
    }

    async fn read(&mut self) -> Result<Reading, Failure> {
        let mntr = self.server.mntr().await;
        let mntr = mntr.map_err(|error| format!("cannot read the server's counters (mntr): {error}"))?;
        self.readings += 1;
        Ok(Reading { mntr, number: self.readings })
    }
}

impl Reading {
    /// What was counted since, but for our readings, each of which cost `own_cost`.
    fn since(&self, earlier: &Reading, own_cost: Packets) -> Counts {
        let readings = self.number - earlier.number;
        let rise = self.mntr.since(&earlier.mntr);
        Counts {
            packets_received: rise.packets_received().saturating_sub(readings * own_cost.received),
            packets_sent: rise.packets_sent().saturating_sub(readings * own_cost.sent),
            data_watches: rise.node_changed(),
            deletion_watches: rise.node_deleted(),
            children_watches: rise.node_children(),
        }
    }
}

// ---------------------------------------------------------------------------------------------
// Figures
// ---------------------------------------------------------------------------------------------

/// What one run showed.
#[derive(Clone, Debug)]
struct Figures {
    recipe: Recipe,
    waiters: usize,
    sessions: usize,
    /// Counted over the releases that had a waiter behind them: as many as there were waiters.
    drain: Counts,
    /// Counted over the last release, which had nobody behind it.
    last_release: Counts,
    hand_offs: Vec<Duration>,
    in_order: bool,
}

impl Figures {
    /// Waiters that the server woke while the queue drained. See [`LEGEND`].
    fn woken(&self) -> u64 {
        let releases = self.waiters as u64;
        match self.recipe {
            Recipe::Naive => self.drain.packets_received.saturating_sub(releases),
            Recipe::Zklock => {
                let by_others =
                    |of: fn(&Counts) -> u64| of(&self.drain).saturating_sub(releases * of(&self.last_release));
                let by_data = by_others(|counts| counts.data_watches);
                let by_deletion = by_others(|counts| counts.deletion_watches);
                by_data.max(by_deletion) + by_others(|counts| counts.children_watches)
            }
        }
    }

    /// What makes this run a failure of the recipe.
    fn fault(&self) -> Option<String> {
        let (woken, waiters) = (self.woken(), self.waiters);
        if woken > waiters as u64 {
            return Some(format!(
                "{}: {waiters} releases woke {woken} waiters: more than one each",
                self.recipe.name()
            ));
        }
        if !self.in_order {
            return Some(format!("{}: {waiters} waiters were not served in their order", self.recipe.name()));
        }
        None
    }

    fn per_release(&self, count: u64) -> f64 {
        count as f64 / self.waiters as f64
    }

    fn hand_off(&self, percent: usize) -> Duration {
        percentile(&self.hand_offs, percent)
    }

    fn fifo(&self) -> &'static str {
        if self.in_order { "yes" } else { "no" }
    }

    /// Replies and notifications are all that a server sends, and each request gets one reply.
    fn notifications(&self) -> u64 {
        self.drain.packets_sent.saturating_sub(self.drain.packets_received)
    }

    fn machine_line(&self) -> String {
        format!(
            "{}: woken_per_release={:.1} requests_per_release={:.1} p50_us={} p99_us={} fifo={}",
            self.recipe.name(),
            self.per_release(self.woken()),
            self.per_release(self.drain.packets_received),
            self.hand_off(50).as_micros(),
            self.hand_off(99).as_micros(),
            self.fifo(),
        )
    }
}

/// The value that `percent` of the sorted `values` do not exceed (nearest rank).
fn percentile(values: &[Duration], percent: usize) -> Duration {
    let rank = (values.len() * percent).div_ceil(100).max(1);
    values.get(rank - 1).copied().unwrap_or_default()
}

const LEGEND: &str = "\
The server counted all but times and order, over the releases that had a waiter behind them.
Watches and events: one for each session that watches, however many of its waiters wait for it.
Woken, naive: each woken waiter asks for the list again, so its requests less the deletions.
Woken, zklock: the watches that fired on nodes waited for. A change and a deletion of one node come
as a pair and count once; the other change is for the holder itself, which watches its own node.
Requests: all packets that the server received, pings included, its counters' readings not.";

/// Both runs side by side.
fn table(herd: &Figures, zklock: &Figures) -> String {
    type Column = fn(&Figures) -> String;
    let rows: [(&str, Column); 11] = [
        ("releases with a waiter behind", |f| f.waiters.to_string()),
        ("watches fired per release", |f| {
            let fired = f.drain.data_watches + f.drain.deletion_watches + f.drain.children_watches;
            format!("{:.1}", f.per_release(fired))
        }),
        ("  child list changed", |f| format!("{:.1}", f.per_release(f.drain.children_watches))),
        ("  node deleted", |f| format!("{:.1}", f.per_release(f.drain.deletion_watches))),
        ("  node's data changed", |f| format!("{:.1}", f.per_release(f.drain.data_watches))),
        ("events sent per release", |f| format!("{:.1}", f.per_release(f.notifications()))),
        ("waiters woken per release", |f| format!("{:.1}", f.per_release(f.woken()))),
        ("requests per release", |f| format!("{:.1}", f.per_release(f.drain.packets_received))),
        ("hand-off, median", |f| millis(f.hand_off(50))),
        ("hand-off, 99th percentile", |f| millis(f.hand_off(99))),
        ("order kept", |f| f.fifo().to_owned()),
    ];
    let title = format!("{} waiters, {} sessions", zklock.waiters, zklock.sessions);
    let mut text = format!("{title:<32}{:>12}{:>12}\n", "naive", "zklock");
    for (what, of) in rows {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{what:<32}{:>12}{:>12}", of(herd), of(zklock));
    }
    text + "\n" + LEGEND
}

fn millis(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1000.0)
}

fn csv_of(rows: &[Figures]) -> String {
    let mut text = String::from(
        "recipe,waiters,sessions,woken_per_release,requests_per_release,events_per_release,\
         children_watches,deletion_watches,data_watches,p50_us,p99_us,fifo\n",
    );
    for row in rows {
        let _ = writeln!(
            text,
            "{},{},{},{:.2},{:.2},{:.2},{},{},{},{},{},{}",
            row.recipe.name(),
            row.waiters,
            row.sessions,
            row.per_release(row.woken()),
            row.per_release(row.drain.packets_received),
            row.per_release(row.notifications()),
            row.drain.children_watches,
            row.drain.deletion_watches,
            row.drain.data_watches,
            row.hand_off(50).as_micros(),
            row.hand_off(99).as_micros(),
            row.fifo(),
        );
    }
    text
}

/// Draws woken waiters per release against the queue's length, as SVG.
fn picture_of(rows: &[Figures]) -> Result<String, Failure> {
    const INK: RGBColor = RGBColor(31, 41, 55);
    const PALE: RGBColor = RGBColor(107, 114, 128);
    const HERD: RGBColor = RGBColor(194, 65, 12);
    const ZKLOCK: RGBColor = RGBColor(29, 78, 216);
    let text = |size: i32, colour: &RGBColor| ("sans-serif", size).into_font().color(colour);

    let points = |recipe: Recipe| -> Vec<(i32, f64)> {
        let of_recipe = rows.iter().filter(|row| row.recipe == recipe);
        of_recipe.map(|row| (row.waiters as i32, row.per_release(row.woken()))).collect()
    };
    let (herd, zklock) = (points(Recipe::Naive), points(Recipe::Zklock));
    let top = 1.12 * herd.iter().chain(&zklock).map(|point| point.1).fold(1.0, f64::max);

    let mut svg = String::new();
    {
        let canvas = SVGBackend::with_string(&mut svg, (860, 520)).into_drawing_area();
        canvas.fill(&WHITE)?;
        canvas.draw(&Text::new("Waiters woken by one release of the lock", (40, 24), text(26, &INK)))?;
        let subtitle = "Counted by the ZooKeeper server while a queue drains; lower is better";
        canvas.draw(&Text::new(subtitle, (40, 58), text(16, &PALE)))?;

        let mut chart = ChartBuilder::on(&canvas)
            .margin_top(92)
            .margin_left(24)
            .margin_right(36)
            .margin_bottom(16)
            .x_label_area_size(58)
            .y_label_area_size(56)
            .build_cartesian_2d(
                (0..108).with_key_points(LENGTHS.map(|length| length as i32).to_vec()),
                -top / 32.0..top,
            )?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(RGBColor(229, 231, 235))
            .axis_style(PALE)
            .x_desc("waiters in the queue")
            .y_desc("woken per release")
            .axis_desc_style(text(17, &INK))
            .label_style(text(15, &PALE))
            .y_label_formatter(&|woken| format!("{woken:.0}"))
            .draw()?;

        // Where each series is named, and from which length on its values fit in.
        let series = [
            (&herd, HERD, "naive: every waiter watches the lock's children", (70, 0.755 * top), 0),
            (&zklock, ZKLOCK, "zklock: every waiter watches the node before its own", (103, 0.12 * top), 20),
        ];
        for (points, colour, name, named_at, values_from) in series {
            let label = text(16, &colour).pos(Pos::new(HPos::Right, VPos::Bottom));
            chart.draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(3)))?;
            chart.draw_series(points.iter().map(|&point| Circle::new(point, 5, colour.filled())))?;
            let valued = points.iter().filter(|(length, _)| *length >= values_from);
            chart.draw_series(valued.map(|&(length, woken)| {
                EmptyElement::at((length, woken)) + Text::new(short(woken), (-5, -7), label.clone())
            }))?;
            chart.draw_series([Text::new(name, named_at, label)])?;
        }
    }
    Ok(svg)
}

/// One decimal where there is one.
fn short(number: f64) -> String {
    let text = format!("{number:.1}");
    text.strip_suffix(".0").map(str::to_owned).unwrap_or(text)
}

// ---------------------------------------------------------------------------------------------
// Files and progress
// ---------------------------------------------------------------------------------------------

/// A file to be written at the end of a long run, tried out before it.
struct Output(PathBuf);

impl Output {
    fn try_out(path: PathBuf) -> Result<Output, Failure> {
        let made_here = !path.exists();
        // What an earlier run wrote stays until this one has something better.
        let opened = File::options().write(true).create(true).truncate(false).open(&path);
        opened.map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        if made_here {
            std::fs::remove_file(&path)?;
        }
        Ok(Output(path))
    }

    fn write(self, text: &str) -> Result<(), Failure> {
        let name = self.0.display();
        std::fs::write(&self.0, text).map_err(|error| format!("cannot write {name}: {error}"))?;
        println!("{name} written");
        Ok(())
    }
}

/// How far a run is, on stderr: a line that is rewritten on a terminal, else one now and then.
struct Progress {
    run: String,
    terminal: bool,
    shown: Instant,
}

impl Progress {
    fn new(run: String) -> Progress {
        let terminal = std::io::stderr().is_terminal();
        if !terminal {
            eprintln!("{run}");
        }
        Progress { run, terminal, shown: Instant::now() }
    }

    fn show(&mut self, state: &str) {
        let pause = Duration::from_millis(if self.terminal { 100 } else { 3000 });
        if self.shown.elapsed() < pause {
            return;
        }
        self.shown = Instant::now();
        match self.terminal {
            true => eprint!("\r\x1b[K{}: {state}", self.run),
            false => eprintln!("{}: {state}", self.run),
        }
    }

    fn done(self) {
        if self.terminal {
            eprintln!("\r\x1b[K{}: done", self.run);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(recipe: Recipe, drain: Counts, last_release: Counts) -> Figures {
        let hand_offs = vec![Duration::from_millis(1); 10];
        Figures { recipe, waiters: 10, sessions: 5, drain, last_release, hand_offs, in_order: true }
    }

    #[test]
    fn a_waiter_that_hears_of_the_change_and_of_the_deletion_was_woken_once() {
        let drain = Counts { data_watches: 10, deletion_watches: 10, ..Counts::default() };
        assert_eq!(figures(Recipe::Zklock, drain, Counts::default()).woken(), 10);
    }

    #[test]
    fn a_holders_watch_on_its_own_node_wakes_no_waiter() {
        let drain = Counts { deletion_watches: 20, ..Counts::default() };
        let last_release = Counts { deletion_watches: 1, ..Counts::default() };
        assert_eq!(figures(Recipe::Zklock, drain, last_release).woken(), 10);
    }

    #[test]
    fn a_herd_is_a_fault_however_it_watches() {
        for drain in [
            Counts { children_watches: 11, ..Counts::default() },
            Counts { data_watches: 11, ..Counts::default() },
            Counts { deletion_watches: 11, ..Counts::default() },
        ] {
            assert!(figures(Recipe::Zklock, drain, Counts::default()).fault().is_some());
        }
    }

    #[test]
    fn the_naive_recipe_wakes_as_many_as_look_again() {
        let drain = Counts { packets_received: 10 + 55, children_watches: 40, ..Counts::default() };
        assert_eq!(figures(Recipe::Naive, drain, Counts::default()).woken(), 55);
    }

    #[test]
    fn an_order_rises_only_if_each_node_comes_after_the_one_before() {
        assert!(rises(&[Some(0), Some(1), Some(7)]));
        assert!(!rises(&[Some(0), Some(2), Some(1)]));
        assert!(!rises(&[Some(0), Some(0)]));
        assert!(!rises(&[Some(0), None]));
    }

    #[test]
    fn percentiles_are_values_that_occurred() {
        let values: Vec<_> = (1..=50).map(Duration::from_millis).collect();
        assert_eq!(percentile(&values, 50), Duration::from_millis(25));
        assert_eq!(percentile(&values, 99), Duration::from_millis(50));
        assert_eq!(percentile(&values[..1], 50), Duration::from_millis(1));
        assert_eq!(percentile(&[], 50), Duration::ZERO);
    }

    #[test]
    fn a_nodes_sequence_is_the_number_at_its_end() {
        assert_eq!(sequence("/lock/lock-0000000012"), Some(12));
        assert_eq!(sequence("_c_b7c8d3e0-8f0a-4f3e-9d1c-2b7a6f5e4d3c-lock-0000000003"), Some(3));
        assert_eq!(sequence("/lock/no-number"), None);
    }
}
