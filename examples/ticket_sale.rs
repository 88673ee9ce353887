//! Sells tickets at several windows at once: with the lock, each ticket exactly once.
//!
//! The stock is a number in a node. To sell a ticket a window reads the stock, thinks for a few
//! milliseconds, and writes the stock less one: a race, unless a lock makes it one step. Every sale
//! is entered, in the same transaction as the new stock, in a ledger of sequential nodes. What is
//! printed and summed up here is that ledger, so it is exact whatever happens to the windows.
//!
//! ```text
//! cargo run --example ticket_sale
//! cargo run --example ticket_sale -- --windows 50 --tickets 500
//! cargo run --example ticket_sale -- --windows 5 --tickets 500 --processes 3
//! cargo run --example ticket_sale -- --no-lock
//! ```
//!
//! It prints a line a sale and a summary:
//!
//! ```text
//! window 3 sold ticket 2, 1 left
//! window 4 sold ticket 1, 0 left
//!
//! sold        20 of 20 tickets, in 20 sales
//! sold twice  0
//! left        0
//! time        0.2 s
//! per window  1: 4, 2: 4, 3: 4, 4: 4, 5: 4
//! ```
//!
//! With `--processes` the windows belong to child processes. Kill one in the middle of the sale
//! (`kill -9 PID`, the numbers are printed): the sale stops for as long as ZooKeeper takes to end
//! the dead sessions, 4 to 6 seconds, and goes on to the last ticket. Stop one (`kill -STOP PID`) and
//! continue it later: its sessions are over, the server takes no sale from them any more, and its
//! windows open new ones.
//!
//! The exit code is 1 if the locked sale sold a ticket twice, out of order or not at all.

mod common;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::hash::{BuildHasher, RandomState};
use std::io::Read as _;
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use clap::Parser;
use tokio::process::Command;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use zklock::zookeeper::{Acls, Client, CreateMode, CreateOptions, Error as ZkError};
use zklock::{Mutex, MutexGuard};
use zklock_support::Server;

use common::{Failure, exit_code, open_session};

/// Sell the tickets of one stock at several windows at once, with the lock or without.
#[derive(Parser)]
#[command(name = "ticket_sale")]
struct Args {
    /// Windows (of each process), each with a session of its own.
    #[arg(long, value_name = "W", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=500))]
    windows: u32,

    /// Tickets in stock.
    #[arg(long, value_name = "T", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    tickets: u32,

    /// Processes that run windows; with 1 they run in this one.
    #[arg(long, value_name = "P", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=50))]
    processes: u32,

    /// Sell without the lock, to see the damage.
    #[arg(long)]
    no_lock: bool,

    /// The number of the first window of a child process, which finds the sale in ZOOKEEPER_CONNECT.
    #[arg(long, hide = true)]
    first_window: Option<u32>,
}

/// The number of tickets left.
const STOCK: &str = "/stock";
/// One child for each sale, in the order in which they were made.
const LEDGER: &str = "/ledger";
/// One child for each window that has come to work.
const WINDOWS: &str = "/windows";
/// Made when all windows are there, so that they begin together.
const OPEN: &str = "/open";
/// The lock under which a window sells.
const LOCK: &str = "/lock";

/// As short as servers allow by default, since it is what a killed process costs the others.
const SESSION_TIMEOUT: Duration = Duration::from_secs(4);

const PERSISTENT: CreateOptions<'static> = CreateMode::Persistent.with_acls(Acls::anyone_all());

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = match args.first_window {
        None => hold_sale(&args).await,
        Some(first) => run_child(&args, first).await,
    };
    exit_code("ticket_sale", outcome)
}

/// Sets up the sale, has the windows sell, and prints the ledger as it grows.
async fn hold_sale(args: &Args) -> Result<(), Failure> {
    let server = Server::try_shared().await?;
    println!("ZooKeeper: {}", server.describe());
    let space = server.space("ticket-sale").await;
    let address = space.connect_string().to_string();
    let office = open_session(&address, Duration::from_secs(20)).await?;
    office.create(STOCK, args.tickets.to_string().as_bytes(), &PERSISTENT).await?;
    office.create(LEDGER, b"", &PERSISTENT).await?;
    office.create(WINDOWS, b"", &PERSISTENT).await?;

    let mut staff = match args.processes {
        1 => Staff::hire_tasks(args, &address),
        _ => Staff::hire_processes(args, &address)?,
    };
    loop {
        tokio::select! {
            assembled = assembled(&office, staff.windows) => { assembled?; break }
            somebody = staff.one_gone() => if !somebody? { break },
        }
    }
    office.create(OPEN, b"", &PERSISTENT).await?;
    let opened = Instant::now();

    let mut tally = Tally::default();
    let mut last_sale = opened;
    let mut at_work = true;
    loop {
        let next = entry(tally.sales.len());
        let sale = match at_work {
            true => tokio::select! {
                biased;
                sale = awaited_sale(&office, &next) => Some(sale?),
                gone = staff.all_gone() => { gone?; at_work = false; None }
            },
            // Nobody is left to write, so what is not there now will not come.
            false => match sale(&office, &next).await? {
                None => break,
                sale => sale,
            },
        };
        if let Some(sale) = sale {
            println!("{}", tally.enter(sale));
            last_sale = Instant::now();
        }
    }

    let left = stock(&office).await?;
    println!("\n{}", tally.summary(args.tickets, left, last_sale - opened));
    tally.verdict(args, left)
}

// ---------------------------------------------------------------------------------------------
// A window
// ---------------------------------------------------------------------------------------------

/// Sells until there is nothing left to sell.
async fn run_window(number: u32, address: String, locked: bool) -> Result<(), Failure> {
    let mut registered = false;
    loop {
        let client = open_session(&address, SESSION_TIMEOUT).await.map_err(|e| format!("window {number}: {e}"))?;
        if !registered {
            let ephemeral = CreateMode::Ephemeral.with_acls(Acls::anyone_all());
            client.create(&format!("{WINDOWS}/{number}"), b"", &ephemeral).await?;
            appears(&client, OPEN).await?;
            registered = true;
        }
        match sell_all(number, &client, locked).await {
            Ok(()) => return Ok(()),
            // A process that was stopped for longer than its session's time-out, say.
            Err(failure) if client.state().is_terminated() => {
                eprintln!("window {number} lost its session ({failure}) and opens another");
            }
            Err(failure) => return Err(format!("window {number}: {failure}").into()),
        }
    }
}

async fn sell_all(number: u32, client: &Client, locked: bool) -> Result<(), Failure> {
    let mutex = Mutex::new(client.clone(), LOCK)?;
    loop {
        let guard = match locked {
            true => Some(mutex.lock().await?),
            false => None,
        };
        let sold_out = sell_one(number, client, guard.as_ref()).await;
        if let Some(guard) = guard
            && let Err(error) = guard.release().await
        {
            eprintln!("window {number}: {error}");
        }
        if sold_out? {
            return Ok(());
        }
    }
}

/// The sale that needs the lock. Returns whether there was no ticket left.
async fn sell_one(number: u32, client: &Client, guard: Option<&MutexGuard>) -> Result<bool, Failure> {
    let ticket = stock(client).await?;
    if ticket == 0 {
        return Ok(true);
    }
    think().await;

    let entry = Sale { window: number, ticket, left: ticket - 1 };
    let sequential = CreateMode::PersistentSequential.with_acls(Acls::anyone_all());
    let mut sale = client.new_multi_writer();
    if let Some(guard) = guard {
        // Even if somebody deletes our node from the queue, the sale counts only while the lock is ours.
        sale.add_check_version(guard.node(), -1)?;
    }
    sale.add_set_data(STOCK, entry.left.to_string().as_bytes(), None)?;
    sale.add_create(&format!("{LEDGER}/"), entry.encode().as_bytes(), &sequential)?;
    match sale.commit().await.map_err(ZkError::from) {
        Ok(_) => {}
        Err(ZkError::NoNode) => eprintln!("window {number} lost the lock before it could sell ticket {ticket}"),
        Err(error) if client.state().is_terminated() => return Err(error.into()),
        // The ledger knows, and this window need not: it just goes on.
        Err(error) => eprintln!("window {number} does not know whether it sold ticket {ticket}: {error}"),
    }
    Ok(false)
}

async fn stock(client: &Client) -> Result<u32, Failure> {
    let (data, _) = client.get_data(STOCK).await?;
    Ok(std::str::from_utf8(&data)?.parse()?)
}

/// One to five milliseconds at the counter.
async fn think() {
    let random = RandomState::new().hash_one(Instant::now());
    tokio::time::sleep(Duration::from_micros(1000 + random % 4000)).await;
}

// ---------------------------------------------------------------------------------------------
// Who runs the windows
// ---------------------------------------------------------------------------------------------

/// The tasks or processes that run windows.
struct Staff {
    members: JoinSet<Result<Leaver, Failure>>,
    /// How many windows those run who are still there.
    windows: u32,
}

/// One of the staff that has ended.
struct Leaver {
    windows: u32,
    /// What went wrong.
    news: Option<String>,
}

impl Staff {
    fn hire_tasks(args: &Args, address: &str) -> Staff {
        let mut members = JoinSet::new();
        for number in 1..=args.windows {
            let window = run_window(number, address.to_owned(), !args.no_lock);
            members.spawn(async move { window.await.map(|()| Leaver { windows: 1, news: None }) });
        }
        Staff { members, windows: args.windows }
    }

    fn hire_processes(args: &Args, address: &str) -> Result<Staff, Failure> {
        let windows = args.windows;
        let mut members = JoinSet::new();
        for process in 1..=args.processes {
            let first = (process - 1) * args.windows + 1;
            let last = first + args.windows - 1;
            let mut command = Command::new(std::env::current_exe()?);
            command.arg("--first-window").arg(first.to_string());
            command.arg("--windows").arg(args.windows.to_string());
            command.args(args.no_lock.then_some("--no-lock"));
            // The child ends when this pipe does: it never outlives us.
            command.env("ZOOKEEPER_CONNECT", address).stdin(Stdio::piped()).kill_on_drop(true);
            let mut child = command.spawn()?;
            let pid = child.id().unwrap_or_default();
            println!("process {process} (pid {pid}): windows {first} to {last}");
            members.spawn(async move {
                let lifeline = child.stdin.take();
                let status = child.wait().await?;
                drop(lifeline);
                let closed =
                    format!("process {process} (pid {pid}) is gone, {status}: windows {first} to {last} closed");
                Ok(Leaver { windows, news: (!status.success()).then_some(closed) })
            });
        }
        Ok(Staff { members, windows: args.windows * args.processes })
    }

    /// Waits until nobody is at work any more.
    async fn all_gone(&mut self) -> Result<(), Failure> {
        while self.one_gone().await? {}
        Ok(())
    }

    /// Waits until one of those still at work has ended. Returns false if there is none.
    async fn one_gone(&mut self) -> Result<bool, Failure> {
        let Some(ended) = self.members.join_next().await else {
            return Ok(false);
        };
        let Leaver { windows, news } = ended??;
        self.windows -= windows;
        match news {
            Some(news) if self.windows > 0 => println!("{news}; the others wait for its sessions to time out"),
            Some(news) => println!("{news}; nobody is left to sell"),
            None => {}
        }
        Ok(true)
    }
}

/// A child process: some windows of a sale that another process holds.
async fn run_child(args: &Args, first: u32) -> Result<(), Failure> {
    let address = std::env::var("ZOOKEEPER_CONNECT")?;
    let mut windows = JoinSet::new();
    for number in first..first + args.windows {
        windows.spawn(run_window(number, address.clone(), !args.no_lock));
    }
    // A terminal's Ctrl-C comes to us as well as to our parent, which decides.
    tokio::spawn(async { while tokio::signal::ctrl_c().await.is_ok() {} });
    let (lifeline, orphaned) = oneshot::channel::<()>();
    // A thread, since a read that tokio has begun would keep this process from ending.
    std::thread::spawn(move || {
        // Nothing is ever sent: a read ends when our parent does.
        let _ = std::io::stdin().read(&mut [0]);
        drop(lifeline);
    });
    tokio::select! {
        sold = async {
            while let Some(ended) = windows.join_next().await {
                ended??;
            }
            Ok(())
        } => sold,
        _ = orphaned => Ok(()),
    }
}

// ---------------------------------------------------------------------------------------------
// Waiting for nodes
// ---------------------------------------------------------------------------------------------

/// Waits until `windows` windows have come to work.
async fn assembled(client: &Client, windows: u32) -> Result<(), Failure> {
    loop {
        let (present, watcher) = client.list_and_watch_children(WINDOWS).await?;
        if present.len() >= windows as usize {
            return Ok(());
        }
        watcher.changed().await;
    }
}

/// Waits until there is a node at `path`.
async fn appears(client: &Client, path: &str) -> Result<(), ZkError> {
    loop {
        let (found, watcher) = client.check_and_watch_stat(path).await?;
        if found.is_some() {
            return Ok(());
        }
        watcher.changed().await;
    }
}

async fn awaited_sale(client: &Client, entry: &str) -> Result<Sale, Failure> {
    loop {
        if let Some(sale) = sale(client, entry).await? {
            return Ok(sale);
        }
        appears(client, entry).await?;
    }
}

async fn sale(client: &Client, entry: &str) -> Result<Option<Sale>, Failure> {
    match client.get_data(entry).await {
        Ok((data, _)) => Sale::decode(&data).map(Some).ok_or_else(|| format!("{entry} is no sale").into()),
        Err(ZkError::NoNode) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The ledger's entry for the sale that `earlier` ones preceded: the server numbers them from 0.
fn entry(earlier: usize) -> String {
    format!("{LEDGER}/{earlier:010}")
}

// ---------------------------------------------------------------------------------------------
// The books
// ---------------------------------------------------------------------------------------------

/// One entry of the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sale {
    window: u32,
    ticket: u32,
    left: u32,
}

impl Sale {
    fn encode(self) -> String {
        format!("{} {} {}", self.window, self.ticket, self.left)
    }

    fn decode(data: &[u8]) -> Option<Sale> {
        let mut numbers = std::str::from_utf8(data).ok()?.split(' ').map(str::parse);
        let mut next = || numbers.next()?.ok();
        Some(Sale { window: next()?, ticket: next()?, left: next()? })
    }
}

/// All sales, in the order in which the server took them.
#[derive(Default)]
struct Tally {
    sales: Vec<Sale>,
    /// How often each ticket was sold.
    by_ticket: BTreeMap<u32, usize>,
}

impl Tally {
    /// Returns the line to print.
    fn enter(&mut self, sale: Sale) -> String {
        let Sale { window, ticket, left } = sale;
        self.sales.push(sale);
        let times = self.by_ticket.entry(ticket).or_default();
        *times += 1;
        let again = if *times > 1 { "  <- again!" } else { "" };
        format!("window {window} sold ticket {ticket}, {left} left{again}")
    }

    fn sold_twice(&self) -> usize {
        self.by_ticket.values().filter(|&&times| times > 1).count()
    }

    fn in_order(&self) -> bool {
        self.sales.is_sorted_by(|earlier, later| earlier.ticket > later.ticket)
    }

    fn summary(&self, tickets: u32, left: u32, time: Duration) -> String {
        let mut by_window = BTreeMap::<u32, usize>::new();
        for sale in &self.sales {
            *by_window.entry(sale.window).or_default() += 1;
        }
        let by_window: Vec<String> = by_window.iter().map(|(window, sales)| format!("{window}: {sales}")).collect();
        let (sold, sales, twice) = (self.by_ticket.len(), self.sales.len(), self.sold_twice());
        let mut text = format!("sold        {sold} of {tickets} tickets, in {sales} sales\n");
        // Writing to a string does not fail.
        let _ = writeln!(text, "sold twice  {twice}{}", if twice > 0 { " (or more often)" } else { "" });
        let _ = writeln!(text, "left        {left}");
        let _ = writeln!(text, "time        {:.1} s", time.as_secs_f64());
        let _ = write!(text, "per window  ");
        for (line, windows) in by_window.chunks(10).enumerate() {
            let _ = write!(text, "{}{}", if line > 0 { ",\n            " } else { "" }, windows.join(", "));
        }
        text
    }

    /// What was promised: with the lock each ticket once and in falling order, and in any case all of them.
    fn verdict(&self, args: &Args, left: u32) -> Result<(), Failure> {
        let (locked, sold, twice) = (!args.no_lock, self.by_ticket.len(), self.sold_twice());
        let missing = (args.tickets as usize).saturating_sub(sold + left as usize);
        let faults = [
            (locked && twice > 0, format!("tickets sold more than once: {twice}")),
            (locked && missing > 0, format!("tickets neither sold nor left: {missing}")),
            (locked && !self.in_order(), "the tickets were not sold in falling order".to_owned()),
            (left > 0, format!("all windows closed with tickets left: {left}")),
        ];
        match faults.into_iter().find(|(found, _)| *found) {
            None => Ok(()),
            Some((_, fault)) => Err(fault.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(tickets: &[u32]) -> Tally {
        let mut tally = Tally::default();
        for &ticket in tickets {
            tally.enter(Sale { window: 1, ticket, left: ticket - 1 });
        }
        tally
    }

    fn verdict(options: &[&str], tickets: &[u32], left: u32) -> Option<String> {
        let args = Args::parse_from(["ticket_sale", "--tickets", "3"].iter().chain(options));
        tally(tickets).verdict(&args, left).err().map(|failure| failure.to_string())
    }

    #[test]
    fn each_ticket_once_in_falling_order_is_a_good_sale() {
        assert_eq!(verdict(&[], &[3, 2, 1], 0), None);
    }

    #[test]
    fn a_ticket_that_was_sold_twice_lost_or_left_fails_the_sale() {
        assert_eq!(verdict(&[], &[3, 2, 2, 1], 0).as_deref(), Some("tickets sold more than once: 1"));
        assert_eq!(verdict(&[], &[3, 1], 0).as_deref(), Some("tickets neither sold nor left: 1"));
        assert_eq!(verdict(&[], &[3, 1, 2], 0).as_deref(), Some("the tickets were not sold in falling order"));
        assert_eq!(verdict(&[], &[3], 2).as_deref(), Some("all windows closed with tickets left: 2"));
    }

    #[test]
    fn without_the_lock_damage_is_what_was_asked_for() {
        assert_eq!(verdict(&["--no-lock"], &[3, 3, 2, 3, 1, 2], 0), None);
    }

    #[test]
    fn a_line_tells_a_ticket_that_was_sold_before() {
        let mut tally = Tally::default();
        let sale = Sale { window: 7, ticket: 493, left: 492 };
        assert_eq!(tally.enter(sale), "window 7 sold ticket 493, 492 left");
        assert_eq!(tally.enter(sale), "window 7 sold ticket 493, 492 left  <- again!");
    }

    #[test]
    fn an_entry_reads_as_it_was_written() {
        let sale = Sale { window: 7, ticket: 493, left: 492 };
        assert_eq!(Sale::decode(sale.encode().as_bytes()), Some(sale));
        assert_eq!(Sale::decode(b"7 493"), None);
        assert_eq!(Sale::decode(b"7 493 x"), None);
    }

    #[test]
    fn the_summary_counts_tickets_and_sales_apart() {
        let summary = tally(&[3, 3, 2, 1, 1]).summary(3, 0, Duration::from_millis(1500));
        let lines: Vec<_> = summary.lines().collect();
        assert_eq!(
            lines,
            [
                "sold        3 of 3 tickets, in 5 sales",
                "sold twice  2 (or more often)",
                "left        0",
                "time        1.5 s",
                "per window  1: 5",
            ]
        );
    }
}
