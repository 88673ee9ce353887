//! Every request that an acquisition makes, with every fault that a connection can have there, in every role.
//!
//! `cargo test --test it matrix -- --nocapture` prints the matrix; `ZKLOCK_CELLS='release holder'` plays only the cells
//! whose names contain that.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex as StdMutex};
use std::time::{Duration, Instant};

use futures::{FutureExt, StreamExt};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use zklock::zookeeper::{Acls, Client, CreateMode};
use zklock::{FencingToken, LockError, Mutex, MutexGuard, Naming, Options, Parents, ReleaseError};
use zklock_support::{Fault, Op, Proxy, Request, Rule, Server, Space};

use crate::{assert_free, eventually, traffic, until_queued, within};

/// The request at which the fault happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Operation {
    Look,
    Parent,
    Enqueue,
    List,
    Watch,
    Deletion,
    OwnWatch,
    Again,
    Release,
    Leave,
    Verify,
    Recover,
    Find,
    Adopt,
}

/// All of them, with the name that each has in the matrix, and what it is.
const OPERATIONS: [(Operation, &str, &str); 14] = [
    (Operation::Look, "look", "it reads the lock's own node"),
    (Operation::Parent, "parent", "it creates the lock's own node"),
    (Operation::Enqueue, "enqueue", "it creates its node"),
    (Operation::List, "list", "it lists the queue"),
    (Operation::Watch, "watch", "of the node before it, for its change and its deletion"),
    (Operation::Deletion, "watch end", "of the node before it, for its deletion only"),
    (Operation::OwnWatch, "own watch", "of its own node"),
    (Operation::Again, "rewatch", "it sets its watches again after a reconnect"),
    (Operation::Release, "release", "it changes and deletes its node"),
    (Operation::Leave, "leave", "it deletes its node; with nobody before it, because it gave up while it enqueued"),
    (Operation::Verify, "verify", "it looks for its node, after a release or leave without an answer"),
    (Operation::Recover, "recover", "it syncs, after an enqueue without an answer"),
    (Operation::Find, "then list", "it lists then"),
    (Operation::Adopt, "then read", "it reads then what may be its node"),
];

/// Where in the queue the contender is whose connection has the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Role {
    /// Alone.
    Free,
    /// The first, with others behind it.
    Holder,
    /// In the middle.
    Waiter,
    /// Behind others.
    Last,
}

const ROLES: [Role; 4] = [Role::Free, Role::Holder, Role::Waiter, Role::Last];
const NAMINGS: [Naming; 2] = [Naming::Tagged, Naming::Compact];

/// What happens to the connection, how that ends, and what those before it in the queue do.
struct Column {
    title: &'static str,
    fault: fn() -> Fault,
    end: End,
    ahead: Ahead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The client connects again by itself.
    Itself,
    Restored,
    Lifted,
    /// The session is over before it is restored.
    TooLate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ahead {
    /// They release one after the other while the fault lasts, or after it.
    ReleaseMeanwhile,
    ReleaseAfterwards,
    /// The nearest gives up while the fault lasts, or after it; afterwards the other one releases.
    LeaveMeanwhile,
    LeaveAfterwards,
}

const COLUMNS: [Column; 12] = [
    Column { title: "FIN <", fault: Fault::fin, end: End::Itself, ahead: Ahead::ReleaseAfterwards },
    Column { title: "FIN >", fault: || Fault::fin().at_answer(), end: End::Itself, ahead: Ahead::ReleaseAfterwards },
    Column {
        title: "RST <",
        fault: || Fault::reset().until_restored(),
        end: End::Restored,
        ahead: Ahead::LeaveMeanwhile,
    },
    Column {
        title: "RST >",
        fault: || Fault::reset().at_answer().until_restored(),
        end: End::Restored,
        ahead: Ahead::LeaveMeanwhile,
    },
    Column { title: "still <", fault: Fault::silence, end: End::Itself, ahead: Ahead::LeaveAfterwards },
    Column {
        title: "still >",
        fault: || Fault::silence().at_answer(),
        end: End::Itself,
        ahead: Ahead::LeaveAfterwards,
    },
    Column { title: "mute", fault: Fault::silence_requests, end: End::Itself, ahead: Ahead::ReleaseMeanwhile },
    Column { title: "deaf", fault: Fault::silence_answers, end: End::Itself, ahead: Ahead::ReleaseMeanwhile },
    Column { title: "held <", fault: Fault::hold, end: End::Lifted, ahead: Ahead::ReleaseMeanwhile },
    Column { title: "held >", fault: || Fault::hold().at_answer(), end: End::Lifted, ahead: Ahead::LeaveMeanwhile },
    Column {
        title: "over <",
        fault: || Fault::silence().until_restored(),
        end: End::TooLate,
        ahead: Ahead::ReleaseMeanwhile,
    },
    Column {
        title: "over >",
        fault: || Fault::silence().at_answer().until_restored(),
        end: End::TooLate,
        ahead: Ahead::ReleaseMeanwhile,
    },
];

const LEGEND: &str = "\
<          before the request is forwarded
>          when the server has answered, before the client is told
FIN        the connection is closed; the client connects again at once, then those before it release
RST        the connection is reset, the nearest before it gives up, then the client can connect again
still      all is swallowed until the client gives the connection up; then the nearest before it does
mute       all that the client sends is swallowed, from the request on; those before it release
deaf       all that the server sends is swallowed, from the request on; those before it release
held       it is held back, and all that follows it, until those before it released, or the nearest gave up
over       as 'still', but until the session is over
ok         never two holders; who should be granted was, or was told that its session is over; nothing was left
ok*        as 'ok', and the session was over in spite of it: the machine was slow";

/// Why some cells cannot occur.
const REASONS: [(char, &str); 6] = [
    ('a', "it waits for somebody, so the lock's node is there"),
    ('b', "nobody is before it, nor does it guess that somebody is"),
    ('c', "nobody is before it, and a node that is not there has no children to watch"),
    ('d', "nobody waits for it, so it does not watch its own node"),
    ('e', "alone, it has no watches to set again"),
    ('f', "only who holds releases"),
];

/// How many cells are played at a time. Most of what they do is waiting.
const AT_ONCE: usize = 80;

/// The client gives up a silent connection after less than half of it.
const SESSION: Duration = Duration::from_secs(6);

/// Of a session that is to be over. Whoever waits for that waits for half as much again.
const SHORT_SESSION: Duration = Duration::from_secs(3);

/// The others' never end.
const LONG_SESSION: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn whatever_breaks_at_whatever_request_nobody_is_left_behind_and_never_two_hold() {
    let start = Instant::now();
    let stage = Arc::new(Stage {
        space: Server::shared().await.space("matrix").await,
        crews: StdMutex::default(),
        lock_count: AtomicUsize::new(0),
    });
    let filter = std::env::var("ZKLOCK_CELLS").unwrap_or_default();
    let mut cells: Vec<_> = Cell::all().filter(|cell| cell.to_string().contains(&filter)).collect();
    // Those that take longest come first.
    cells.sort_by_key(|cell| std::cmp::Reverse(cell.column));
    let played = futures::stream::iter(cells).map(|cell| stage.clone().play(cell)).buffer_unordered(AT_ONCE);
    let outcomes: BTreeMap<Cell, Outcome> = played.collect().await;
    print(&outcomes);
    println!("{} cells in {:.0} s", outcomes.len(), start.elapsed().as_secs_f64());
    let failed = outcomes.iter().filter_map(|(cell, outcome)| match outcome {
        Outcome::Failed(why) => Some(format!("{cell}: {why}\n")),
        Outcome::Played(_) | Outcome::CannotOccur(_) => None,
    });
    let failed: Vec<_> = failed.collect();
    assert!(failed.is_empty(), "{} cells failed:\n{}", failed.len(), failed.concat());
    assert!(!outcomes.is_empty(), "there is no cell {filter:?}");
}

fn print(outcomes: &BTreeMap<Cell, Outcome>) {
    let titles: String = COLUMNS.iter().map(|column| format!("{:9}", column.title)).collect();
    println!("{:31}{titles}", "");
    for (operation, role, naming) in rows() {
        let row = (0..COLUMNS.len()).map(|column| Cell { operation, role, naming, column });
        let entries: Vec<_> = row.map(|cell| outcomes.get(&cell).map_or(String::new(), Outcome::to_string)).collect();
        if entries.iter().any(|entry| !entry.is_empty()) {
            let entries: String = entries.iter().map(|entry| format!("{entry:9}")).collect();
            println!(
                "{:11}{:9}{:11}{entries}",
                title(operation),
                format!("{role:?}"),
                format!("{:?}", NAMINGS[naming])
            );
        }
    }
    for (_, title, what) in OPERATIONS {
        println!("{title:11}{what}");
    }
    println!("{LEGEND}");
    for (letter, reason) in REASONS {
        println!("{:11}it cannot occur: {reason}", format!("-{letter}"));
    }
}

/// Namings, and columns too, by their index.
fn rows() -> impl Iterator<Item = (Operation, Role, usize)> {
    let roles = OPERATIONS.into_iter().flat_map(|(operation, ..)| ROLES.map(|role| (operation, role)));
    roles.flat_map(|(operation, role)| (0..NAMINGS.len()).map(move |naming| (operation, role, naming)))
}

fn title(operation: Operation) -> &'static str {
    OPERATIONS.into_iter().find(|(other, ..)| *other == operation).expect("all of them have one").1
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Cell {
    operation: Operation,
    role: Role,
    naming: usize,
    column: usize,
}

impl Cell {
    fn all() -> impl Iterator<Item = Cell> {
        rows().flat_map(|(operation, role, naming)| {
            (0..COLUMNS.len()).map(move |column| Cell { operation, role, naming, column })
        })
    }

    fn naming(self) -> Naming {
        NAMINGS[self.naming]
    }

    fn fault(self) -> Fault {
        (COLUMNS[self.column].fault)()
    }

    fn end(self) -> End {
        COLUMNS[self.column].end
    }

    fn is_first(self) -> bool {
        matches!(self.role, Role::Free | Role::Holder)
    }

    /// Why there is no such request, as a letter of [`REASONS`].
    fn cannot_occur(self) -> Option<char> {
        match (self.operation, self.role) {
            (Operation::Parent, Role::Waiter | Role::Last) => Some('a'),
            (Operation::Watch, Role::Free | Role::Holder) => (self.naming() == Naming::Tagged).then_some('b'),
            (Operation::Deletion, Role::Free | Role::Holder) => Some('c'),
            (Operation::OwnWatch, Role::Free) => Some('d'),
            (Operation::Again, Role::Free) => Some('e'),
            (Operation::Release, Role::Waiter | Role::Last) => Some('f'),
            _ => None,
        }
    }

    /// The first in the queue knows that it is by the answer to its create, if the lock's node is the library's.
    fn is_lock_node_foreign(self) -> bool {
        self.is_first() && matches!(self.operation, Operation::List | Operation::Watch)
    }

    /// With compact names there is a list only if the node that bears the number before is gone.
    fn is_one_gone(self) -> bool {
        let operation = if self.is_first() { Operation::Watch } else { Operation::List };
        self.naming() == Naming::Compact && self.operation == operation
    }

    /// How many are in the queue before.
    fn ahead(self) -> usize {
        match (self.is_first(), self.operation, self.naming()) {
            (true, ..) => 0,
            // Of the only one before us, the deletion is all that there is to know.
            (_, Operation::Deletion, Naming::Tagged) => 1,
            _ => 2,
        }
    }

    fn is_anyone_behind(self) -> bool {
        matches!(self.role, Role::Holder | Role::Waiter)
    }

    /// A request that has to fail for this one to be made.
    fn prelude(self) -> Option<(Fault, Operation)> {
        match self.operation {
            Operation::Recover | Operation::Find | Operation::Adopt => {
                Some((Fault::fin().at_answer(), Operation::Enqueue))
            }
            Operation::Verify if self.is_first() => Some((Fault::fin(), Operation::Release)),
            Operation::Verify => Some((Fault::fin(), Operation::Leave)),
            _ => None,
        }
    }
}

impl std::fmt::Display for Cell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let role = self.role;
        let (title, column) = (title(self.operation), COLUMNS[self.column].title);
        let name = format!("{title} {role:?} {:?} {column}", self.naming());
        f.write_str(&name.to_lowercase())
    }
}

enum Outcome {
    Played(Ending),
    CannotOccur(char),
    Failed(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Fine,
    /// The session was over, and who had to be told was told.
    SessionOver,
    /// It was, and it should not have been.
    SessionOverTooSoon,
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Outcome::Played(Ending::Fine | Ending::SessionOver) => f.write_str("ok"),
            Outcome::Played(Ending::SessionOverTooSoon) => f.write_str("ok*"),
            Outcome::CannotOccur(letter) => write!(f, "-{letter}"),
            Outcome::Failed(_) => f.write_str("FAILED"),
        }
    }
}

/// What all cells share.
struct Stage {
    space: Space<'static>,
    /// Sessions without faults, of cells that have been played.
    crews: StdMutex<Vec<Crew>>,
    lock_count: AtomicUsize,
}

/// Those who are before the one with the fault, and who comes after it.
#[derive(Clone)]
struct Crew {
    ahead: [Client; 2],
    behind: Client,
}

impl Stage {
    async fn play(self: Arc<Self>, cell: Cell) -> (Cell, Outcome) {
        if let Some(letter) = cell.cannot_occur() {
            return (cell, Outcome::CannotOccur(letter));
        }
        for _ in 0..5 {
            // Tests that count what the server does come between.
            let _shared = traffic().read_owned().await;
            let scene = Arc::new(Scene::set(self.clone(), cell).await);
            match AssertUnwindSafe(scene.clone().play()).catch_unwind().await {
                Ok(ending) => {
                    self.crews.lock().unwrap().push(scene.crew.clone());
                    return (cell, Outcome::Played(ending));
                }
                Err(_) if scene.was_too_slow() => {}
                Err(panic) => {
                    let text = panic.downcast_ref::<String>().cloned();
                    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()));
                    return (cell, Outcome::Failed(text.unwrap_or_default()));
                }
            }
        }
        (cell, Outcome::Failed("the session was over before it began, five times".into()))
    }

    async fn crew(&self) -> Crew {
        let idle = self.crews.lock().unwrap().pop();
        match idle {
            Some(crew) => crew,
            None => {
                let connect = || self.space.connect_with(LONG_SESSION);
                let (first, second, behind) = tokio::join!(connect(), connect(), connect());
                Crew { ahead: [first, second], behind }
            }
        }
    }
}

/// A cell being played.
struct Scene {
    stage: Arc<Stage>,
    cell: Cell,
    path: String,
    crew: Crew,
    proxy: Proxy,
    /// The session with the fault, and its lock.
    faulty: Client,
    mutex: Mutex,
    has_fired: AtomicBool,
    inside: StdMutex<Inside>,
}

/// Who holds, as those who hold see it.
#[derive(Default)]
struct Inside {
    holder: Option<Holder>,
    last: Option<FencingToken>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holder {
    token: FencingToken,
    session: Whose,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whose {
    Faulty,
    Other,
}

/// Somebody whose connection has no fault. Once it holds, it keeps the lock until this is dropped.
struct Other {
    keeps: oneshot::Sender<()>,
    done: JoinHandle<()>,
}

impl Other {
    async fn gives_up(self) {
        self.done.abort();
        assert!(self.done.await.unwrap_err().is_cancelled());
    }

    async fn goes_on(self) {
        drop(self.keeps);
        served(self.done).await;
    }
}

async fn served(done: JoinHandle<()>) {
    within("one of the others", done).await.unwrap();
}

/// How it went for the one with the fault, and who came behind it.
type Played = (Ending, Option<JoinHandle<()>>);

/// The one with the fault, which holds as soon as it is granted, and releases.
type Locking = JoinHandle<Ending>;

impl Scene {
    async fn set(stage: Arc<Stage>, cell: Cell) -> Scene {
        let path = format!("/cell-{}", stage.lock_count.fetch_add(1, Ordering::Relaxed));
        let proxy = Proxy::start(stage.space.server().connect_string()).await;
        let session = if cell.end() == End::TooLate { SHORT_SESSION } else { SESSION };
        let crew = stage.crew().await;
        let faulty = within("a session", connect(&stage.space.connect_string_through(&proxy), session)).await;
        let mutex = Mutex::with_options(&faulty, &path, options(cell, "faulty")).unwrap();
        let (has_fired, inside) = (AtomicBool::new(false), StdMutex::default());
        Scene { stage, cell, path, crew, proxy, faulty, mutex, has_fired, inside }
    }

    async fn play(self: Arc<Self>) -> Ending {
        self.prepare().await;
        let (ending, behind) = match (self.cell.operation, self.cell.is_first()) {
            (Operation::OwnWatch | Operation::Again, true) => self.hold_with_a_follower().await,
            (Operation::Release | Operation::Verify, true) => self.release().await,
            (Operation::Leave, true) => self.leave_while_enqueueing().await,
            (Operation::Leave | Operation::Verify, false) => self.leave().await,
            (Operation::Again, _) => self.reconnect().await,
            _ => self.acquire().await,
        };
        self.conclude(ending, behind).await
    }

    /// The fault happens while it acquires.
    async fn acquire(self: &Arc<Self>) -> Played {
        let ahead = self.ahead().await;
        let faults = self.arm(self.cell.operation).await;
        let locking = self.lock();
        let behind = self.unfold(faults, ahead, None).await;
        (within("the grant", locking).await.unwrap(), behind)
    }

    /// The fault happens while it holds and another contender of its session comes, or has come.
    async fn hold_with_a_follower(self: &Arc<Self>) -> Played {
        let guard = within("a free lock", self.mutex.lock()).await.unwrap();
        let holder = self.enter(&guard, Whose::Faulty).await;
        let node = guard.node().to_owned();
        let watches_own = move |request: &Request| sets_data_watch(request) && request.path.ends_with(&node);
        let (faults, following) = match self.cell.operation {
            Operation::Again => {
                let settled = self.proxy.arm(Fault::none().at_answer(), watches_own);
                let following = self.lock();
                self.until_fired(&settled).await;
                (self.arm_and_cut(&mut Vec::new()).await, following)
            }
            _ => (self.arm_at(watches_own), self.lock()),
        };
        let behind = self.unfold(faults, Vec::new(), None).await;
        self.leave_inside(holder);
        let released = self.released(within("the release", guard.release()).await).await;
        let followed = within("the follower's grant", following).await.unwrap();
        (if followed == Ending::Fine { released } else { followed }, behind)
    }

    /// The fault happens while it releases.
    async fn release(self: &Arc<Self>) -> Played {
        let guard = within("a free lock", self.mutex.lock()).await.unwrap();
        let holder = self.enter(&guard, Whose::Faulty).await;
        let behind = self.behind().await;
        let faults = self.arm(self.cell.operation).await;
        self.leave_inside(holder);
        let releasing = tokio::spawn(guard.release());
        let behind = self.unfold(faults, Vec::new(), behind).await;
        (self.released(within("the release", releasing).await.unwrap()).await, behind)
    }

    /// The fault happens while a waiter gives up.
    async fn leave(self: &Arc<Self>) -> Played {
        let ahead = self.ahead().await;
        let locking = self.wait_for_turn().await;
        let behind = self.behind().await;
        let faults = self.arm(self.cell.operation).await;
        locking.abort();
        let behind = self.unfold(faults, ahead, behind).await;
        (self.ending(), behind)
    }

    /// The fault happens while one gives up that is the first of the queue, and was not told so.
    async fn leave_while_enqueueing(self: &Arc<Self>) -> Played {
        let enqueueing = self.proxy.arm(Fault::hold().at_answer(), enqueues);
        let locking = self.lock();
        self.until_fired(&enqueueing).await;
        locking.abort();
        assert!(locking.await.unwrap_err().is_cancelled());
        // Let the contender know of it before the answer. If it takes longer, it leaves as one that holds.
        tokio::time::sleep(Duration::from_millis(50)).await;
        let faults = self.arm_at(|request| leaves(request) || releases(request));
        enqueueing.lift();
        let behind = self.unfold(faults, Vec::new(), None).await;
        (self.ending(), behind)
    }

    /// The fault happens at the reconnect of a waiter.
    async fn reconnect(self: &Arc<Self>) -> Played {
        let mut ahead = self.ahead().await;
        let locking = self.wait_for_turn().await;
        let faults = self.arm_and_cut(&mut ahead).await;
        let behind = self.unfold(faults, ahead, None).await;
        (within("the grant", locking).await.unwrap(), behind)
    }

    async fn arm_and_cut(&self, ahead: &mut Vec<Other>) -> Faults {
        let faults = self.arm(self.cell.operation).await;
        self.proxy.cut();
        // Then the watches have something to tell.
        self.meanwhile(ahead).await;
        self.proxy.restore();
        Faults { connections: faults.connections + 1, ..faults }
    }

    /// The fault happens, the others come and go, and the connection is healed.
    ///
    /// Who came behind may have come to be before it, so it goes on from now on as soon as it can.
    async fn unfold(
        self: &Arc<Self>,
        faults: Faults,
        mut ahead: Vec<Other>,
        behind: Option<Other>,
    ) -> Option<JoinHandle<()>> {
        for rule in &faults.rules {
            self.until_fired(rule).await;
        }
        self.has_fired.store(true, Ordering::Release);
        let behind = match behind {
            Some(behind) => Some(behind),
            None => self.behind().await,
        };
        self.meanwhile(&mut ahead).await;
        match self.cell.end() {
            End::Itself => {}
            End::Restored => self.proxy.restore(),
            End::Lifted => faults.rules.iter().for_each(Rule::lift),
            End::TooLate => {
                within("the end of the session", self.over()).await;
                self.proxy.restore();
            }
        }
        self.afterwards(ahead, &faults).await;
        behind.map(|behind| behind.done)
    }

    /// What those before it do while the fault lasts.
    async fn meanwhile(&self, ahead: &mut Vec<Other>) {
        match COLUMNS[self.cell.column].ahead {
            Ahead::ReleaseMeanwhile => self.go_on(std::mem::take(ahead)).await,
            Ahead::LeaveMeanwhile => self.nearest_gives_up(ahead).await,
            Ahead::ReleaseAfterwards | Ahead::LeaveAfterwards => {}
        }
    }

    /// What they do when it is over.
    async fn afterwards(&self, mut ahead: Vec<Other>, faults: &Faults) {
        if ahead.is_empty() {
            return;
        }
        if self.cell.end() != End::Lifted {
            let connected = async || self.proxy.traffic().connections >= faults.connections || self.is_over();
            eventually("the client connects again", connected).await;
        }
        // So that it most likely waits again, with watches that tell.
        tokio::time::sleep(Duration::from_millis(100)).await;
        if COLUMNS[self.cell.column].ahead == Ahead::LeaveAfterwards {
            self.nearest_gives_up(&mut ahead).await;
        }
        // Whoever took that for its turn has the time to take it.
        tokio::time::sleep(Duration::from_millis(50)).await;
        self.go_on(ahead).await;
    }

    /// Everybody was served, nothing is left, and the lock can be had: by the same session too, if it lives.
    async fn conclude(self: &Arc<Self>, ending: Ending, behind: Option<JoinHandle<()>>) -> Ending {
        if let Some(behind) = behind {
            served(behind).await;
        }
        until_queued(self.stage.space.admin(), &self.path, 0).await;
        let ending = match ending {
            Ending::Fine => self.hold(within("the lock once more", self.mutex.lock()).await).await,
            over => over,
        };
        assert_free(&self.crew.behind, &self.path).await;
        match (ending, self.cell.end()) {
            (Ending::Fine, End::TooLate) => panic!("the session should be over"),
            (Ending::SessionOver, end) if end != End::TooLate => Ending::SessionOverTooSoon,
            (ending, _) => ending,
        }
    }

    /// What the operation needs to find at the server.
    async fn prepare(&self) {
        let (admin, path) = (self.stage.space.admin(), &self.path);
        match self.cell.operation {
            Operation::Parent => {}
            _ if self.cell.is_lock_node_foreign() => {
                let options = CreateMode::Persistent.with_acls(Acls::anyone_all());
                admin.create(path, b"theirs", &options).await.unwrap();
            }
            _ => self.observer().lock().await.unwrap().release().await.unwrap(),
        }
    }

    async fn ahead(self: &Arc<Self>) -> Vec<Other> {
        let mut ahead = Vec::new();
        for (client, label) in self.crew.ahead.iter().zip(["first", "second"]).take(self.cell.ahead()) {
            ahead.push(self.contend(client, label).await);
        }
        if self.cell.is_one_gone() {
            let admin = self.stage.space.admin();
            let mode = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
            let prefix = format!("{}/lock-", self.path);
            let (_, sequence) = admin.create(&prefix, b"", &mode).await.unwrap();
            admin.delete(&format!("{prefix}{sequence}"), None).await.unwrap();
        }
        ahead
    }

    /// It may hold already.
    async fn behind(self: &Arc<Self>) -> Option<Other> {
        match self.cell.is_anyone_behind() {
            true => Some(self.contend(&self.crew.behind, "behind").await),
            false => None,
        }
    }

    async fn nearest_gives_up(&self, ahead: &mut Vec<Other>) {
        // A holder has nothing to give up.
        if ahead.len() > 1
            && let Some(nearest) = ahead.pop()
        {
            nearest.gives_up().await;
            let gone = async || !self.is_in_queue("second").await;
            eventually("who gave up is gone", gone).await;
        }
    }

    async fn go_on(&self, others: Vec<Other>) {
        for other in others {
            other.goes_on().await;
        }
    }

    /// Has somebody contend, and waits until it is in the queue.
    async fn contend(self: &Arc<Self>, client: &Client, label: &str) -> Other {
        let mutex = Mutex::with_options(client, &self.path, options(self.cell, label)).unwrap();
        let (keeps, kept) = oneshot::channel::<()>();
        let scene = self.clone();
        let done = tokio::spawn(async move {
            let guard = mutex.lock().await.unwrap();
            let holder = scene.enter(&guard, Whose::Other).await;
            let _ = kept.await;
            scene.leave_inside(holder);
            guard.release().await.unwrap();
        });
        eventually("somebody else is in the queue", async || self.is_in_queue(label).await).await;
        Other { keeps, done }
    }

    fn lock(self: &Arc<Self>) -> Locking {
        let scene = self.clone();
        tokio::spawn(async move { scene.hold(scene.mutex.lock().await).await })
    }

    /// The one with the fault waits, with all its watches set.
    async fn wait_for_turn(self: &Arc<Self>) -> Locking {
        let settled = self.proxy.arm(Fault::none().at_answer(), self.picks(Operation::OwnWatch).await);
        let locking = self.lock();
        self.until_fired(&settled).await;
        locking
    }

    async fn is_in_queue(&self, label: &str) -> bool {
        self.observer().queue().await.unwrap().iter().any(|waiter| waiter.label == label)
    }

    fn observer(&self) -> Mutex {
        Mutex::with_options(self.stage.space.admin(), &self.path, options(self.cell, "observer")).unwrap()
    }

    /// The fault of this cell, and the one before it that it takes to come there.
    async fn arm(&self, operation: Operation) -> Faults {
        let mut rules = Vec::new();
        if let Some((fault, operation)) = self.cell.prelude() {
            rules.push(self.proxy.arm(fault, self.picks(operation).await));
        }
        rules.push(self.proxy.arm(self.cell.fault(), self.picks(operation).await));
        Faults { connections: self.proxy.traffic().connections + rules.len() as u64, rules }
    }

    fn arm_at(&self, picks: impl Fn(&Request) -> bool + Send + Sync + 'static) -> Faults {
        let rules = vec![self.proxy.arm(self.cell.fault(), picks)];
        Faults { connections: self.proxy.traffic().connections + 1, rules }
    }

    /// Which requests are the operation, among those of the one with the fault.
    async fn picks(&self, operation: Operation) -> Box<dyn Fn(&Request) -> bool + Send + Sync> {
        let queue = self.observer().queue().await.unwrap();
        let others: Vec<_> = queue.into_iter().map(|waiter| waiter.node).collect();
        let is_others = move |request: &Request| others.iter().any(|node| request.path.ends_with(node));
        let (path, is_first) = (self.path.clone(), self.cell.is_first());
        match operation {
            Operation::Look => Box::new(move |request| reads(request) && request.path.ends_with(&path)),
            Operation::Parent => Box::new(move |request| request.op == Op::Create && request.path.ends_with(&path)),
            Operation::Enqueue => Box::new(enqueues),
            Operation::List => Box::new(lists),
            // Of the first, it is one that is not there.
            Operation::Watch => Box::new(move |request| sets_data_watch(request) && (is_first || is_others(request))),
            Operation::Deletion => {
                Box::new(move |request| request.op == Op::GetChildren && request.watches && is_others(request))
            }
            Operation::OwnWatch => Box::new(move |request| sets_data_watch(request) && !is_others(request)),
            Operation::Again => Box::new(|request| request.op == Op::SetWatches),
            Operation::Release => Box::new(releases),
            Operation::Leave => Box::new(leaves),
            Operation::Verify => Box::new(|request| request.op == Op::Exists),
            Operation::Recover => Box::new(|request| request.op == Op::Sync),
            Operation::Find => match self.cell.naming() {
                Naming::Compact => Box::new(|request| request.op == Op::GetEphemerals),
                _ => Box::new(lists),
            },
            Operation::Adopt => Box::new(move |request| reads(request) && !request.path.ends_with(&path)),
        }
    }

    async fn until_fired(&self, rule: &Rule) {
        tokio::select! {
            () = within("the request", rule.fired()) => {}
            () = self.over() => panic!("the session is over"),
        }
    }

    /// Resolves when the session with the fault is over, as far as its client knows.
    async fn over(&self) {
        let mut states = self.faulty.state_watcher();
        while !self.is_over() {
            states.changed().await;
        }
    }

    fn is_over(&self) -> bool {
        self.faulty.state().is_terminated()
    }

    /// That is nobody's fault.
    fn was_too_slow(&self) -> bool {
        self.is_over() && !self.has_fired.load(Ordering::Acquire)
    }

    async fn hold(&self, locked: Result<MutexGuard, LockError>) -> Ending {
        match locked {
            Ok(guard) => {
                let holder = self.enter(&guard, Whose::Faulty).await;
                self.leave_inside(holder);
                self.released(within("the release", guard.release()).await).await
            }
            Err(LockError::SessionExpired { .. }) => self.session_over().await,
            Err(error) => panic!("{error}"),
        }
    }

    async fn released(&self, released: Result<(), ReleaseError>) -> Ending {
        match released {
            Ok(()) => Ending::Fine,
            Err(ReleaseError::Lost { .. }) => self.session_over().await,
            Err(error) => panic!("{error}"),
        }
    }

    /// It must be true.
    async fn session_over(&self) -> Ending {
        within("the end of the session, of which was told", self.over()).await;
        Ending::SessionOver
    }

    /// Of who is told nothing, as it has given up.
    fn ending(&self) -> Ending {
        if self.is_over() { Ending::SessionOver } else { Ending::Fine }
    }

    /// Whoever holds comes here, and looks whether it is alone: in this process, and at the server.
    async fn enter(&self, guard: &MutexGuard, session: Whose) -> Holder {
        let holder = Holder { token: guard.fencing_token(), session };
        let (before, last) = {
            let mut inside = self.inside.lock().unwrap();
            (inside.holder.replace(holder), inside.last.replace(holder.token))
        };
        let queue = self.observer().queue().await.unwrap();
        let earlier: Vec<_> = queue.iter().filter(|waiter| waiter.token < holder.token).collect();
        assert!(earlier.is_empty(), "{holder:?} was granted while there were {earlier:?}");
        match before {
            None => assert!(last < Some(holder.token), "{holder:?} was granted after {last:?}"),
            Some(before) if before.session == session => panic!("{before:?} and {holder:?} hold both"),
            // One of them lost it with its session, and could not be told yet.
            Some(_) => within("the end of the session of one of two holders", self.over()).await,
        }
        holder
    }

    fn leave_inside(&self, holder: Holder) {
        let mut inside = self.inside.lock().unwrap();
        if inside.holder == Some(holder) {
            inside.holder = None;
        }
    }
}

/// What is armed, and how many connections there will have been when it has happened and the client came again.
struct Faults {
    rules: Vec<Rule>,
    connections: u64,
}

/// A short session may be over before it begins.
async fn connect(connect_string: &str, session: Duration) -> Client {
    loop {
        if let Ok(client) = Client::connector().with_session_timeout(session).connect(connect_string).await {
            return client;
        }
    }
}

fn options(cell: Cell, label: &str) -> Options {
    // A container might be taken away at any moment, and requests would come in another order.
    Options::default().parents(Parents::Persistent).naming(cell.naming()).label(label)
}

fn enqueues(request: &Request) -> bool {
    let mut creates = request.parts.iter().chain([request]).filter(|part| part.op == Op::Create);
    creates.any(|create| create.path.ends_with("lock-"))
}

fn lists(request: &Request) -> bool {
    request.op == Op::GetChildren && !request.watches
}

fn reads(request: &Request) -> bool {
    request.op == Op::GetData && !request.watches
}

fn sets_data_watch(request: &Request) -> bool {
    request.op == Op::GetData && request.watches
}

fn releases(request: &Request) -> bool {
    request.is_multi_of(&[Op::SetData, Op::Delete])
}

fn leaves(request: &Request) -> bool {
    request.op == Op::Delete
}
