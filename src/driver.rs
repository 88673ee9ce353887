//! Runs acquisitions against ZooKeeper. The only file that awaits the server.
//!
//! Each acquisition is a task that owns its node from the request that creates it to its confirmed end. The caller
//! holds nothing but channels to that task: dropping them at any moment is a message, and needs neither time nor a
//! runtime.

use std::future::{Future, pending};
use std::mem;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures::{FutureExt, StreamExt, TryStreamExt};
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};

use crate::cohort::{Baton, Opening, Passed, Seat};
use crate::contender::{Cause, Contender, Input, Node, Op, Patience, Tell, Watch};
use crate::error::{LockError, ReleaseError};
use crate::local::{LocalQueue, Parent, Place, SessionLocks, Stage, Watching};
use crate::name::{Entry, Kind, LockPath, Tag};
use crate::options::{Naming, Options, Parents};
use crate::queue::Queue;
use crate::session::Session;
use crate::zookeeper::{
    Client, CreateMode, Error, EventType, MultiWriteError, MultiWriteResult, OneshotWatcher, SessionState, Stat,
    StateWatcher, WatchedEvent,
};

/// How long a time-out may overrun while its entry is taken out of the queue of a server that has stopped to
/// answer although the connection looks alive.
const LEAVE_GRACE: Duration = Duration::from_millis(500);

/// How many reads [`Lock::entries`] has under way at once.
const READS_AT_ONCE: usize = 64;

/// What a lock's own node holds when the library created it.
const MARK: &[u8] = b"zklock/1 mutex";

/// What all acquisitions of a lock share.
#[derive(Debug)]
pub struct Lock {
    pub session: Session,
    pub path: LockPath,
    options: Options,
    local: Arc<LocalQueue>,
    warned_of_foreign_children: AtomicBool,
}

/// Why an acquisition ended without a hold.
#[derive(Clone, Debug)]
pub enum NotHeld {
    WouldBlock,
    Failed(LockError),
}

/// A hold: its node, and the way to end it. Dropping the hold ends it too.
#[derive(Debug)]
pub struct Hold {
    pub node: Node,
    end: End,
}

/// How a hold is ended.
#[derive(Debug)]
enum End {
    Own(oneshot::Sender<Reply>),
    /// The entry may serve others of the session yet.
    Shared(Baton),
}

pub type Reply = oneshot::Sender<Result<(), ReleaseError>>;

impl Lock {
    pub fn new(session: Session, path: LockPath, options: Options) -> Self {
        let client = session.client();
        let local = SessionLocks::of(client).at(format!("{}{path}", client.path().trim_end_matches('/')));
        Self { session, path, options, local, warned_of_foreign_children: AtomicBool::new(false) }
    }

    /// Acquires, until the deadline at the most. Dropping the future leaves the queue.
    pub async fn acquire(
        self: &Arc<Self>,
        kind: Kind,
        patience: Patience,
        deadline: Option<Instant>,
    ) -> Result<Hold, NotHeld> {
        let Some(runtime) = self.session.runtime() else {
            return Err(NotHeld::Failed(LockError::NoRuntime { path: self.path.to_string() }));
        };
        if let (Kind::Exclusive, Patience::Wait, Some(limit)) = (kind, patience, self.options.holds_of_an_entry()) {
            return self.acquire_in_cohort(&runtime, limit, deadline).await;
        }
        let (caller, answer) = oneshot::channel();
        let (end, ended) = oneshot::channel();
        let deadline = deadline.map_or(Deadline::None, Deadline::At);
        let contender = Contender::new(Tag::unique(self.options.naming_rule()), kind, patience);
        runtime.spawn(Driver::new(self.clone(), contender, Caller::Task(caller), ended, deadline).run());
        match answer.await {
            Ok(Ok(node)) => Ok(Hold { node, end: End::Own(end) }),
            Ok(Err(not_held)) => Err(not_held),
            Err(_) => Err(NotHeld::Failed(self.runtime_shutdown())),
        }
    }

    /// Waits with the others of the session for the entries that they share.
    async fn acquire_in_cohort(
        self: &Arc<Self>,
        runtime: &Handle,
        limit: u32,
        deadline: Option<Instant>,
    ) -> Result<Hold, NotHeld> {
        let (mut waiter, opening) = self.local.cohort().join(limit);
        if let Some(opening) = opening {
            self.open(runtime, opening);
        }
        let deadline = match deadline {
            Some(moment) => {
                // The caller may be on another executor, without a timer.
                let _in_runtime = runtime.enter();
                tokio::time::sleep_until(moment.into()).left_future()
            }
            None => pending().right_future(),
        };
        let turn = tokio::select! {
            biased;
            turn = waiter.turn() => turn,
            () = deadline => match waiter.time_up() {
                Some(removal) => {
                    if let Some(removal) = removal {
                        // It is never sent anything.
                        let _ = removal.await;
                    }
                    return Err(NotHeld::WouldBlock);
                }
                None => waiter.turn().await,
            },
        };
        match turn {
            Some(Ok((node, baton))) => Ok(Hold { node, end: End::Shared(baton) }),
            Some(Err(not_held)) => Err(not_held),
            None => Err(NotHeld::Failed(self.runtime_shutdown())),
        }
    }

    /// Puts an entry of a cohort into the queue.
    fn open(self: &Arc<Self>, runtime: &Handle, opening: Opening) {
        let Opening { seat, end, time_up } = opening;
        let contender = Contender::new(Tag::unique(self.options.naming_rule()), Kind::Exclusive, Patience::Wait);
        let deadline = Deadline::Told(time_up);
        runtime.spawn(Driver::new(self.clone(), contender, Caller::Cohort(seat), end, deadline).run());
    }

    /// Ends the hold and waits for the server's word on it. Dropping the future does not stop the release.
    pub async fn release(&self, hold: Hold) -> Result<(), ReleaseError> {
        let node = self.path.child(&hold.node.name);
        let end = match hold.end {
            End::Own(end) => end,
            End::Shared(baton) => match baton.pass_on() {
                Passed::On => return Ok(()),
                Passed::Last(end) => end,
                Passed::Lost => return Err(ReleaseError::Lost { node }),
            },
        };
        let (reply, replied) = oneshot::channel();
        if end.send(reply).is_ok()
            && let Ok(outcome) = replied.await
        {
            return outcome;
        }
        Err(ReleaseError::RuntimeShutdown { node })
    }

    /// The queue with what its nodes hold. Nodes that vanish while they are read are left out.
    pub async fn entries(self: &Arc<Self>) -> Result<Vec<(Entry, Vec<u8>, Stat)>, LockError> {
        let Some(runtime) = self.session.runtime() else {
            return Err(LockError::NoRuntime { path: self.path.to_string() });
        };
        let lock = self.clone();
        let reading = AbortOnDrop(runtime.spawn(async move { lock.entries_here().await }));
        reading.await.unwrap_or_else(|_| Err(self.runtime_shutdown()))
    }

    async fn entries_here(&self) -> Result<Vec<(Entry, Vec<u8>, Stat)>, LockError> {
        let mut backoff = Backoff::new(self.client());
        loop {
            let error = match self.read_entries().await {
                Ok(entries) => return Ok(entries),
                Err(error) => error,
            };
            match (Answer::of(&error), backoff.next()) {
                (Answer::Refused, _) => return Err(self.refused("read the queue", error)),
                (Answer::Unknown, Some(delay)) => tokio::time::sleep(delay).await,
                (Answer::SessionOver, _) | (Answer::Unknown, None) => return Err(self.session_expired()),
            }
        }
    }

    async fn read_entries(&self) -> Result<Vec<(Entry, Vec<u8>, Stat)>, Error> {
        let queue = match self.list().await {
            Err(Error::NoNode) => return Ok(Vec::new()),
            listed => listed?,
        };
        let read = |entry: Entry| async move {
            match self.client().get_data(&self.path.child(&entry.name)).await {
                Ok((data, stat)) => Ok(Some((entry, data, stat))),
                Err(Error::NoNode) => Ok(None),
                Err(error) => Err(error),
            }
        };
        let reads = futures::stream::iter(queue.into_entries()).map(read).buffered(READS_AT_ONCE);
        reads.try_filter_map(|entry| async { Ok(entry) }).try_collect().await
    }

    /// A listing that shows at least what the server answered before this call.
    async fn shared_listing(self: &Arc<Self>) -> Result<Arc<Queue>, Error> {
        let lock = self.clone();
        self.local.listing(|| async move { lock.list().await.map(Arc::new) }.boxed()).await
    }

    async fn list(&self) -> Result<Queue, Error> {
        let (queue, foreign) = Queue::new(self.client().list_children(self.path.as_str()).await?);
        if foreign > 0 && !self.warned_of_foreign_children.swap(true, Ordering::Relaxed) {
            tracing::warn!(path = %self.path, foreign, "ignoring children that are no contenders of the lock");
        }
        Ok(queue)
    }

    /// Puts a node into the queue, and says whether it is known to be the only one there.
    async fn create(&self, tag: &Tag) -> Result<(Node, bool), Error> {
        if self.local.parent() == Parent::Unknown {
            self.local.set_parent(self.read_parent().await?);
        }
        if let Some(version) = self.local.take_version()
            && let Some(created) = self.create_and_count(tag, version).await?
        {
            return Ok(created);
        }
        let prefix = tag.prefix();
        let mode = CreateMode::EphemeralSequential.with_acls(self.options.acls());
        let (stat, sequence) =
            self.client().create(&self.path.child(&prefix), &tag.data(self.options.label_text()), &mode).await?;
        Ok((Node { name: format!("{prefix}{sequence}"), czxid: stat.czxid }, false))
    }

    async fn read_parent(&self) -> Result<Parent, Error> {
        match self.client().get_data(self.path.as_str()).await {
            Ok((data, stat)) if data == MARK => Ok(Parent::Ours { version: stat.version }),
            Ok(_) | Err(Error::NoAuth) => Ok(Parent::Foreign),
            Err(error) => Err(error),
        }
    }

    /// One transaction: the node, and our mark on its parent once more, whose answer counts the children. Nothing
    /// is done if the parent is not as we know it.
    async fn create_and_count(&self, tag: &Tag, version: i32) -> Result<Option<(Node, bool)>, Error> {
        let mode = CreateMode::EphemeralSequential.with_acls(self.options.acls());
        let mut writer = self.client().new_multi_writer();
        writer.add_create(&self.path.child(&tag.prefix()), &tag.data(self.options.label_text()), &mode)?;
        writer.add_set_data(self.path.as_str(), MARK, Some(version))?;
        let results = match writer.commit().await {
            Ok(results) => results,
            Err(MultiWriteError::OperationFailed { index: 1, source: Error::BadVersion }) => return Ok(None),
            Err(MultiWriteError::OperationFailed { index: 1, source: Error::NoAuth }) => {
                self.local.set_parent(Parent::Foreign);
                return Ok(None);
            }
            Err(error) => {
                self.local.set_parent(Parent::Unknown);
                return Err(error.into());
            }
        };
        let [MultiWriteResult::Create { path, .. }, MultiWriteResult::SetData { stat }] = results.as_slice() else {
            return Err(Error::UnexpectedError(format!("a create and a write were answered with {results:?}")));
        };
        self.local.set_parent(Parent::Ours { version: stat.version });
        let name = path.rsplit('/').next().unwrap_or(path).to_owned();
        // Both were done in one transaction; servers before 3.8.2 tell its number for the second only.
        Ok(Some((Node { name, czxid: stat.mzxid }, stat.num_children == 1)))
    }

    /// Creates the lock's node and what is missing above it, the chroot included, from the leaf upwards: of nodes
    /// that exist it may be forbidden to know.
    async fn make_parents(&self) -> Result<(), Error> {
        let mode = match self.options.parents_mode() {
            Parents::Container => CreateMode::Container,
            Parents::Persistent => CreateMode::Persistent,
            Parents::MustExist => return Err(Error::NoNode),
        }
        .with_acls(self.options.acls());
        self.local.set_parent(Parent::Unknown);
        let chroot = self.client().path().trim_end_matches('/');
        let leaf = format!("{chroot}{}", self.path);
        let above_chroot = self.client().clone().chroot("/").unwrap_or_else(|client| client);
        let mut missing = vec![leaf.as_str()];
        while let Some(path) = missing.last().copied() {
            let data = if path == leaf { MARK } else { b"" };
            match above_chroot.create(path, data, &mode).await {
                Ok(_) if path == leaf => {
                    self.local.set_parent(Parent::Ours { version: 0 });
                    missing.pop();
                }
                Ok(_) | Err(Error::NodeExists) => drop(missing.pop()),
                Err(Error::NoNode) => match path.rsplit_once('/') {
                    Some((parent, _)) if !parent.is_empty() => missing.push(parent),
                    _ => return Err(Error::NoNode),
                },
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The nodes of an attempt whose create had no answer.
    ///
    /// After a reconnect the leader refuses what the old connection may still bring, and the `sync` is behind
    /// everything that it accepted: what is not seen now will never appear. A node of another session is not ours
    /// to adopt, whatever its name; it goes when that session expires.
    async fn recover(&self, tag: &Tag) -> Result<Vec<Node>, Error> {
        let client = self.client();
        client.sync(self.path.as_str()).await?;
        let names: Vec<String> = match tag.naming() {
            Naming::Tagged => client.list_children(self.path.as_str()).await?,
            Naming::Compact => {
                let ours = client.list_ephemerals(self.path.as_str()).await?;
                ours.iter().filter_map(|path| Some(path.strip_prefix(self.path.as_str())?[1..].to_owned())).collect()
            }
        };
        let mut nodes = Vec::new();
        for name in names {
            let is_candidate = tag.naming() == Naming::Compact || tag.is_in_name(&name);
            if is_candidate && let Some(node) = self.recover_node(tag, name).await? {
                nodes.push(node);
            }
        }
        nodes.sort_by_key(|node| node.czxid);
        Ok(nodes)
    }

    async fn recover_node(&self, tag: &Tag, name: String) -> Result<Option<Node>, Error> {
        match self.client().get_data(&self.path.child(&name)).await {
            Ok((data, stat))
                if stat.ephemeral_owner == self.client().session_id().0
                    && (tag.is_in_name(&name) || tag.is_in_data(&data)) =>
            {
                Ok(Some(Node { name, czxid: stat.czxid }))
            }
            Ok(_) | Err(Error::NoNode) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// One transaction, in which the change says that it was a holder who let go.
    async fn release_node(&self, node: &Node) -> Result<(), Error> {
        let path = self.path.child(&node.name);
        let mut writer = self.client().new_multi_writer();
        writer.add_set_data(&path, b"released", None)?;
        writer.add_delete(&path, None)?;
        writer.commit().await?;
        Ok(())
    }

    async fn verify(&self, node: &Node) -> Result<bool, Error> {
        let stat = self.client().check_stat(&self.path.child(&node.name)).await?;
        Ok(stat.is_some_and(|stat| stat.czxid == node.czxid))
    }

    fn client(&self) -> &Client {
        self.session.client()
    }

    fn refused(&self, doing: &'static str, source: Error) -> LockError {
        LockError::Refused { path: self.path.to_string(), doing, source }
    }

    fn session_expired(&self) -> LockError {
        LockError::SessionExpired { path: self.path.to_string(), state: self.client().state() }
    }

    fn runtime_shutdown(&self) -> LockError {
        LockError::RuntimeShutdown { path: self.path.to_string() }
    }
}

/// The task of one acquisition.
struct Driver {
    lock: Arc<Lock>,
    contender: Contender,
    /// Until the acquisition is decided.
    caller: Caller,
    /// While tasks of the session share the hold.
    seat: Option<Seat>,
    /// Until the caller ended what it asked for.
    end: Option<oneshot::Receiver<Reply>>,
    /// Who waits for the outcome of the release.
    releaser: Option<Reply>,
    deadline: Deadline,
    states: StateWatcher,
    backoff: Backoff,
    /// How long to wait before the next request.
    delay: Duration,
    /// What the server refused, and its answer.
    refusal: Option<(&'static str, Error)>,
    running: Request,
    watches: Watches,
    has_waited: bool,
    /// The node of a hold that was lost before the holder released it.
    lost: Option<String>,
    /// Where the others of our session find us, while we have a node.
    place: Option<Place>,
}

/// Who is told how an acquisition went.
enum Caller {
    Nobody,
    Task(oneshot::Sender<Result<Node, NotHeld>>),
    Cohort(Seat),
}

/// The end of the caller's patience.
enum Deadline {
    None,
    At(Instant),
    /// The caller says when.
    Told(oneshot::Receiver<()>),
    /// It is past, and the entry is being taken out of the queue. At this moment the caller is told in any case.
    Grace(Instant),
}

/// What came of a request.
enum Event {
    Answer(Input),
    Armed(Watch, OneshotWatcher, Watching),
    /// A contender of our own session will tell; whether it is the predecessor itself.
    Queued(LocalWatch),
    Failed(&'static str, Error),
}

/// The watches that are armed, each until it has told.
#[derive(Default)]
struct Watches {
    own: Option<Told>,
    data: Option<Told>,
    children: Option<Told>,
    local: Option<LocalWatch>,
}

/// What a watch tells, or nothing when the session ended.
type Told = Pin<Box<dyn Future<Output = Option<WatchedEvent>> + Send>>;

impl Watches {
    fn arm(&mut self, watch: Watch, watcher: OneshotWatcher, watching: Watching) {
        let told = Some(told(watcher, watching));
        match watch {
            Watch::Own(_) => self.own = told,
            Watch::Data(_) => self.data = told,
            Watch::Children(_) => self.children = told,
        }
    }

    fn drop_predecessor(&mut self) {
        self.data = None;
        self.children = None;
        self.local = None;
    }

    /// What the first watch to tell has told. The order in which they are asked is the order in which they count.
    async fn next(&mut self) -> Input {
        let event = tokio::select! {
            biased;
            event = heard(&mut self.own) => return event.map_or(Input::SessionOver, |_| Input::OwnTouched),
            event = heard(&mut self.data) => event,
            event = heard(&mut self.children) => event,
            input = heard_locally(&mut self.local) => return input,
        };
        match event {
            Some(event) if event.event_type == EventType::NodeDataChanged => Input::Changed(event.zxid),
            Some(event) => Input::Gone(event.zxid),
            None => Input::SessionOver,
        }
    }

    fn is_own_touched(&mut self) -> bool {
        heard(&mut self.own).now_or_never().is_some()
    }
}

/// A contender of our own session that tells how it fares.
struct LocalWatch {
    stages: watch::Receiver<Stage>,
    /// It is the very one before us, and not only one of those.
    is_predecessor: bool,
    seen: Stage,
}

async fn heard_locally(local: &mut Option<LocalWatch>) -> Input {
    let Some(watch) = local else {
        return pending().await;
    };
    let input = loop {
        let stage = *watch.stages.borrow_and_update();
        if stage == watch.seen {
            match watch.stages.changed().await {
                Ok(()) => continue,
                Err(_) => break Input::Left,
            }
        }
        watch.seen = stage;
        match stage {
            Stage::Holding if watch.is_predecessor => return Input::Next,
            Stage::Waiting | Stage::Holding => {}
            Stage::Passed if watch.is_predecessor => break Input::Passed,
            Stage::Passed | Stage::Left => break Input::Left,
        }
    };
    *local = None;
    input
}

async fn heard(told: &mut Option<Told>) -> Option<WatchedEvent> {
    let Some(watch) = told else {
        return pending().await;
    };
    let event = watch.await;
    *told = None;
    event
}

type Request = Pin<Box<dyn Future<Output = Event> + Send>>;

impl Driver {
    fn new(
        lock: Arc<Lock>,
        contender: Contender,
        caller: Caller,
        end: oneshot::Receiver<Reply>,
        deadline: Deadline,
    ) -> Self {
        Self {
            contender,
            caller,
            seat: None,
            end: Some(end),
            releaser: None,
            deadline,
            states: lock.client().state_watcher(),
            backoff: Backoff::new(lock.client()),
            delay: Duration::ZERO,
            refusal: None,
            running: nothing(),
            watches: Watches::default(),
            has_waited: false,
            lost: None,
            place: None,
            lock,
        }
    }

    async fn run(mut self) {
        self.feed(Input::Start);
        while !self.contender.is_ended() {
            let input = tokio::select! {
                biased;
                input = self.watches.next() => input,
                event = &mut self.running => {
                    self.running = nothing();
                    match event {
                        Event::Answer(input) => self.answered(input),
                        Event::Failed(doing, error) => self.failed(doing, error),
                        Event::Armed(watch, watcher, watching) => {
                            self.watches.arm(watch, watcher, watching);
                            self.answered(Input::Armed)
                        }
                        Event::Queued(local) => {
                            self.watches.local = Some(local);
                            Input::Queued
                        }
                    }
                }
                releaser = ended(&mut self.end) => {
                    self.releaser = releaser;
                    Input::Abandon
                }
                () = self.deadline.passed() => match self.time_up() {
                    Some(input) => input,
                    None => continue,
                },
                () = followed(&self.place) => Input::Followed,
                state = self.states.changed() => of_state(state),
            };
            if matches!(input, Input::Gone(_) | Input::Passed) {
                self.catch_up();
            }
            if !self.contender.is_ended() {
                self.feed(input);
            }
        }
        self.break_the_news().await;
    }

    /// A hold that was lost before its end: the holder learns it when it releases.
    async fn break_the_news(&mut self) {
        if let Some(node) = self.lost.take() {
            self.releaser = ended(&mut self.end).await;
            self.report(Err(ReleaseError::Lost { node }));
        }
    }

    /// Before the end of the predecessor counts, what came before it has to: the client handed all of it over in
    /// its order, but to several channels, of which some were looked at before that.
    fn catch_up(&mut self) {
        if self.watches.is_own_touched() {
            self.feed(Input::OwnTouched);
        }
        if let Some(state) = self.states.changed().now_or_never() {
            self.feed(of_state(state));
        }
    }

    fn feed(&mut self, input: Input) {
        let mut ops = Vec::new();
        self.contender.handle(input, &mut ops);
        if self.place.is_none()
            && let Some(node) = self.contender.node()
        {
            self.place = Some(self.lock.local.enter(node));
        }
        for op in ops {
            match &op {
                Op::Watch(_) if !self.has_waited => {
                    self.has_waited = true;
                    self.lock.local.is_contended();
                }
                Op::Watch(_) => {}
                Op::Create => {
                    self.watches = Watches::default();
                    self.place = None;
                }
                Op::Tell(Tell::Granted(_)) => {
                    if let Some(place) = &self.place {
                        place.is_holding();
                    }
                    if !self.has_waited {
                        self.lock.local.is_free_again();
                    }
                    self.watches.drop_predecessor();
                    self.running = nothing();
                }
                Op::Tell(Tell::Released | Tell::Lost(_)) => {
                    if let Some(place) = self.place.take() {
                        place.has_passed();
                    }
                }
                Op::Tell(Tell::Requeued) => {}
                _ => self.watches.drop_predecessor(),
            }
            match op {
                Op::Tell(tell) => self.tell(tell),
                op => {
                    let own = self.contender.node().map(|node| node.name.clone());
                    self.running = request(self.lock.clone(), self.contender.tag().clone(), own, op, self.delay);
                }
            }
        }
    }

    fn answered(&mut self, input: Input) -> Input {
        self.backoff.reset();
        self.delay = Duration::ZERO;
        input
    }

    fn failed(&mut self, doing: &'static str, error: Error) -> Input {
        match Answer::of(&error) {
            Answer::Refused => {
                self.refusal = Some((doing, error));
                self.answered(Input::Refused)
            }
            Answer::SessionOver => Input::SessionOver,
            Answer::Unknown => {
                tracing::debug!(path = %self.lock.path, doing, %error, "outcome unknown");
                match self.backoff.next() {
                    Some(delay) => {
                        self.delay = delay;
                        Input::Unknown
                    }
                    None => Input::SessionOver,
                }
            }
        }
    }

    /// The caller's time is up: first its entry is taken out of the queue, then it is told. Of a server that is
    /// known to be out of reach it would wait for that in vain.
    fn time_up(&mut self) -> Option<Input> {
        match self.deadline {
            Deadline::At(_) | Deadline::Told(_) if self.lock.client().state() == SessionState::SyncConnected => {
                self.deadline = Deadline::Grace(Instant::now() + LEAVE_GRACE);
                Some(Input::TimeUp)
            }
            Deadline::At(_) | Deadline::Told(_) => {
                self.decide(Err(NotHeld::WouldBlock));
                Some(Input::TimeUp)
            }
            Deadline::Grace(_) | Deadline::None => {
                self.decide(Err(NotHeld::WouldBlock));
                None
            }
        }
    }

    fn tell(&mut self, tell: Tell) {
        let path = &self.lock.path;
        match tell {
            Tell::Granted(node) => {
                tracing::debug!(%path, node = node.name, "granted");
                self.decide(Ok(node));
            }
            Tell::Requeued => tracing::warn!(%path, "the waiter's node was deleted; it queues again, at the end"),
            Tell::WouldBlock => self.decide(Err(NotHeld::WouldBlock)),
            Tell::Failed(cause) => {
                let error = self.failure(cause);
                self.decide(Err(NotHeld::Failed(error)));
            }
            Tell::Released => self.report(Ok(())),
            Tell::Lost(node) => {
                let node = path.child(&node.name);
                tracing::warn!(%path, node, "the lock was lost before its release");
                let opening = self.seat.take().and_then(Seat::lost);
                if let (Some(opening), Some(runtime)) = (opening, self.lock.session.runtime()) {
                    self.lock.open(&runtime, opening);
                }
                match self.releaser {
                    Some(_) => self.report(Err(ReleaseError::Lost { node })),
                    None => self.lost = Some(node),
                }
            }
            Tell::ReleaseRefused(node) => {
                let node = path.child(&node.name);
                let source = self.refusal.take().map_or(Error::NoAuth, |(_, source)| source);
                tracing::error!(%path, node, %source, "the node cannot be deleted and stays until the session ends");
                self.report(Err(ReleaseError::Refused { node, source }));
            }
        }
    }

    fn failure(&mut self, cause: Cause) -> LockError {
        let path = self.lock.path.to_string();
        match (cause, self.refusal.take()) {
            (Cause::Refused, Some((MAKE_PARENTS, Error::NoNode))) => LockError::NoParent { path },
            (Cause::Refused, Some((doing, source))) => LockError::Refused { path, doing, source },
            (Cause::SequenceExhausted, _) => LockError::SequenceExhausted { path },
            (Cause::Unanswered, _) => LockError::Unanswered { path },
            (Cause::SessionOver | Cause::Refused, _) => self.lock.session_expired(),
        }
    }

    /// Tells the caller how its acquisition went, unless it knows already or is gone.
    fn decide(&mut self, decision: Result<Node, NotHeld>) {
        self.deadline = Deadline::None;
        // A grant that nobody takes comes back as the end of the hold: its other channel is dropped with it.
        match (mem::replace(&mut self.caller, Caller::Nobody), decision, &self.place) {
            (Caller::Task(caller), decision, _) => drop(caller.send(decision)),
            (Caller::Cohort(seat), Ok(node), Some(place)) => {
                seat.granted(node, place.to_follow());
                self.seat = Some(seat);
            }
            (Caller::Cohort(seat), Err(not_held), _) => seat.failed(&not_held),
            (Caller::Cohort(_), Ok(_), None) => unreachable!("a holder has a node, and with it a place"),
            (Caller::Nobody, ..) => {}
        }
    }

    fn report(&mut self, outcome: Result<(), ReleaseError>) {
        if let Some(releaser) = self.releaser.take() {
            let _ = releaser.send(outcome);
        }
    }
}

impl Drop for Driver {
    /// The runtime is being shut down under us. A request is sent when it is made, so the node goes all the same,
    /// if the client lives on another runtime.
    fn drop(&mut self) {
        if let Some(node) = self.contender.node() {
            drop(self.lock.client().delete(&self.lock.path.child(&node.name), None));
        }
    }
}

const MAKE_PARENTS: &str = "create the node";

/// Makes the request that the contender asks for, after a delay.
fn request(lock: Arc<Lock>, tag: Tag, own: Option<String>, op: Op, delay: Duration) -> Request {
    Box::pin(async move {
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        let client = lock.client();
        match op {
            Op::Create => match lock.create(&tag).await {
                Ok((node, is_alone)) => Event::Answer(Input::Created { node, is_alone }),
                Err(Error::NoNode) => Event::Answer(Input::NoParent),
                Err(error) => Event::Failed("create a node in the queue", error),
            },
            Op::MakeParents => match lock.make_parents().await {
                Ok(()) => Event::Answer(Input::ParentsMade),
                Err(error) => Event::Failed(MAKE_PARENTS, error),
            },
            Op::Recover => match lock.recover(&tag).await {
                Ok(nodes) => Event::Answer(Input::Recovered(nodes)),
                Err(Error::NoNode) => Event::Answer(Input::NoParent),
                Err(error) => Event::Failed("find a node in the queue", error),
            },
            Op::List => match lock.shared_listing().await {
                Ok(queue) => Event::Answer(Input::Listed(queue)),
                Err(Error::NoNode) => Event::Answer(Input::NoParent),
                Err(error) => Event::Failed("list the queue", error),
            },
            Op::Watch(watch) => match arm(&lock, own.as_deref().unwrap_or_default(), watch).await {
                Ok(event) => event,
                Err(Error::NoNode) => Event::Answer(Input::NoNode),
                Err(error) => Event::Failed("watch a node in the queue", error),
            },
            Op::Remove(node) => removed(client.delete(&lock.path.child(&node.name), None).await),
            Op::Release(node) => removed(lock.release_node(&node).await),
            Op::Verify(node) => match lock.verify(&node).await {
                Ok(is_ours) => Event::Answer(Input::Verified(is_ours)),
                Err(error) => Event::Failed("look for a node in the queue", error),
            },
            Op::Tell(_) => unreachable!("the driver tells, the server does not"),
        }
    })
}

fn removed(outcome: Result<(), Error>) -> Event {
    match outcome {
        Ok(()) => Event::Answer(Input::Removed),
        Err(Error::NoNode) => Event::Answer(Input::NoNode),
        Err(error) => Event::Failed("delete a node in the queue", error),
    }
}

/// Watches a node, unless a contender of our own session can tell as well, or has to be waited for before anyhow.
async fn arm(lock: &Lock, own: &str, watch: Watch) -> Result<Event, Error> {
    let name = match &watch {
        Watch::Data(name) | Watch::Children(name) => name,
        Watch::Own(node) => &node.name,
    };
    if let Watch::Data(predecessor) | Watch::Children(predecessor) = &watch {
        // A compact name may have come again, so who had it in our session need not be who has it now.
        let is_predecessor = lock.options.naming_rule() == Naming::Tagged;
        let stages = lock.local.stage_of(predecessor).map(|stages| (stages, is_predecessor));
        if let Some((stages, is_predecessor)) = stages.or_else(|| Some((lock.local.stage_before(own)?, false))) {
            return Ok(Event::Queued(LocalWatch { stages, is_predecessor, seen: Stage::Waiting }));
        }
    }
    let path = lock.path.child(name);
    let watching = lock.local.watching(&path);
    let watcher = match &watch {
        Watch::Data(_) => lock.client().get_and_watch_data(&path).await?.2,
        Watch::Children(_) => lock.client().list_and_watch_children(&path).await?.1,
        Watch::Own(node) => match lock.client().get_and_watch_data(&path).await? {
            (_, stat, watcher) if stat.czxid == node.czxid => watcher,
            _ => return Ok(Event::Answer(Input::NoNode)),
        },
    };
    Ok(Event::Armed(watch, watcher, watching))
}

fn told(watcher: OneshotWatcher, watching: Watching) -> Told {
    // The client's watchers panic when the runtime of the client is gone.
    let told = AssertUnwindSafe(watcher.changed()).catch_unwind();
    Box::pin(told.map(move |event| {
        drop(watching);
        event.ok().filter(|event| event.event_type != EventType::Session)
    }))
}

fn nothing() -> Request {
    Box::pin(pending())
}

fn of_state(state: SessionState) -> Input {
    if state.is_terminated() { Input::SessionOver } else { Input::Reconnected }
}

async fn followed(place: &Option<Place>) {
    match place {
        Some(place) => place.followed().await,
        None => pending().await,
    }
}

/// Resolves once the caller released, with whom to report to, or dropped what it had.
async fn ended(end: &mut Option<oneshot::Receiver<Reply>>) -> Option<Reply> {
    let Some(receiver) = end else {
        return pending().await;
    };
    let releaser = receiver.await.ok();
    *end = None;
    releaser
}

impl Deadline {
    async fn passed(&mut self) {
        match self {
            Self::None => pending().await,
            Self::Told(is_up) => match is_up.await {
                Ok(()) => {}
                Err(_) => {
                    *self = Self::None;
                    pending().await
                }
            },
            Self::At(moment) | Self::Grace(moment) => tokio::time::sleep_until((*moment).into()).await,
        }
    }
}

/// What an error of the client says about the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// The server's own word that it was not done, and never will be.
    Refused,
    /// The session is over.
    SessionOver,
    /// It may have been done, or still be done.
    Unknown,
}

impl Answer {
    /// Only what is known to be the server's answer to this very request counts as one.
    fn of(error: &Error) -> Self {
        match error {
            Error::NoNode
            | Error::NodeExists
            | Error::NoAuth
            | Error::BadVersion
            | Error::NoChildrenForEphemerals
            | Error::NotEmpty
            | Error::InvalidAcl
            | Error::QuotaExceeded
            | Error::Unimplemented
            | Error::MarshallingError
            // Not the server's word but the client's: it did not send the request.
            | Error::BadArguments(_) => Self::Refused,
            Error::SessionExpired | Error::AuthFailed | Error::ClientClosed => Self::SessionOver,
            _ => Self::Unknown,
        }
    }
}

/// The time between attempts while outcomes are unknown: doubling, capped, with jitter, and not for ever.
struct Backoff {
    attempt: u32,
    since: Option<Instant>,
    /// Without any answer for so long, the session is over, whatever the client says: it expires itself sooner.
    limit: Duration,
}

impl Backoff {
    const FIRST: Duration = Duration::from_millis(10);
    const LONGEST: Duration = Duration::from_secs(1);

    fn new(client: &Client) -> Self {
        Self { attempt: 0, since: None, limit: client.session_timeout() * 2 }
    }

    fn next(&mut self) -> Option<Duration> {
        let since = *self.since.get_or_insert_with(Instant::now);
        let delay = Self::FIRST.saturating_mul(1 << self.attempt.min(16)).min(Self::LONGEST);
        self.attempt += 1;
        (since.elapsed() <= self.limit).then(|| delay.mul_f64(0.5 + fastrand::f64() / 2.0))
    }

    fn reset(&mut self) {
        self.attempt = 0;
        self.since = None;
    }
}

/// A task that nobody waits for any more has nothing to do.
struct AbortOnDrop<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl<T> Future for AbortOnDrop<T> {
    type Output = Result<T, tokio::task::JoinError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> std::task::Poll<Self::Output> {
        self.0.poll_unpin(cx)
    }
}
