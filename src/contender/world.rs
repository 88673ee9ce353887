//! A small ZooKeeper with contenders on it, step by step, for the tests and the model checker.
//!
//! There is one history of transactions. Each client is connected to a server that has applied a part of it, answers
//! reads from there, and tells of changes when it applies them, before it answers anything later. Writes are executed
//! at the end of the history and answered when the client's server has come to them.

use super::*;
use crate::options::Naming;

/// Who does not run our machine: another library's client, with plain deletes.
const FOREIGN: usize = usize::MAX;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    pub rules: Rules,
    /// What is left of each kind of mishap.
    budget: Budget,
    /// The states of the lock's node that some server may still be in; the last one is the truth.
    history: Vec<Tree>,
    /// What led from each state to the next.
    transactions: Vec<Transaction>,
    /// The transaction that led to the first state of the history.
    base: i64,
    pub clients: Vec<Client>,
    last_token: i64,
    /// The first sentence that turned out to be wrong.
    pub violation: Option<&'static str>,
}

/// How the world works, and which rule is broken on purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Rules {
    /// The lock's node exists already.
    pub has_parent: bool,
    /// Enqueueing counts the children.
    pub is_fast: bool,
    /// The contenders name their nodes so that each knows the name of the one before it.
    pub is_compact: bool,
    /// Events tell their transaction, as servers since 3.9 do.
    pub tells_zxid: bool,
    /// All clients share one session, and tell each other. (That their servers lag behind each on its own is more than
    /// can happen.)
    pub is_shared: bool,
    pub flaw: Option<Flaw>,
}

/// A rule that is broken on purpose, to see that its violation is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Flaw {
    /// A create without an answer is repeated without looking.
    BlindCreate,
    /// Looking for the node of a lost create without the `sync`.
    NoSync,
    /// The change of the predecessor is taken for its deletion.
    ChangeIsDeletion,
    /// Nothing is told of our own node.
    NoOwnWatch,
    /// What is told after a reconnect is believed as before.
    NoVoid,
    /// A predecessor that went is taken to have been the holder.
    GoneIsRelease,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Budget {
    pub breaks: u8,
    pub abandons: u8,
    pub expiries: u8,
    pub deletions: u8,
    pub touches: u8,
    pub foreigners: u8,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Tree {
    has_parent: bool,
    next_sequence: i64,
    children: Vec<Child>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Child {
    node: Node,
    owner: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Transaction {
    MakeParent,
    DeleteParent,
    Create {
        owner: usize,
    },
    /// The children that went.
    Delete(Vec<String>),
    /// A child that was changed and went.
    Release(String),
    Touch(String),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Client {
    pub contender: Contender,
    pub running: Option<Running>,
    watched_data: Option<String>,
    watched_children: Option<String>,
    watched_own: Option<String>,
    /// The contender of its own session that will tell it.
    local: Option<usize>,
    /// What that has told.
    signals: Vec<Input>,
    /// Where its server is in the history.
    applied: usize,
    pub is_abandoned: bool,
    pub is_expired: bool,
    pub told: Vec<Tell>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Running {
    pub op: Op,
    /// Once it was executed: where its server has to come to for the answer.
    outcome: Option<(usize, Input)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// A write reaches the leader.
    Execute(usize),
    /// A read is answered.
    Answer(usize),
    /// A client's server applies the next transaction and tells what is watched.
    Advance(usize),
    /// A client hears what another of its session has to tell.
    Hear(usize),
    /// The connection breaks and is made anew: at a server in the same state, or at one that has applied all.
    Break {
        client: usize,
        is_server_ahead: bool,
        is_failure_first: bool,
    },
    Abandon(usize),
    /// The leader ends the session.
    Expire(usize),
    /// The client learns of it.
    Learn(usize),
    /// An operator deletes the node of a client.
    Delete(usize),
    /// An operator deletes everything.
    DeleteAll,
    /// Somebody writes to the node of a client.
    Touch(usize),
    /// A client of another library joins the queue, or leaves it.
    Join,
    Part,
}

impl World {
    pub fn new(patiences: &[Patience], rules: Rules, budget: Budget) -> Self {
        let naming = if rules.is_compact { Naming::Compact } else { Naming::Tagged };
        let client = |(i, patience): (usize, &Patience)| Client {
            contender: Contender::new(Tag::named(&i.to_string(), naming), Kind::Exclusive, *patience),
            running: None,
            watched_data: None,
            watched_children: None,
            watched_own: None,
            local: None,
            signals: Vec::new(),
            applied: 0,
            is_abandoned: false,
            is_expired: false,
            told: Vec::new(),
        };
        let mut world = Self {
            rules,
            budget,
            history: vec![Tree { has_parent: rules.has_parent, ..Tree::default() }],
            transactions: Vec::new(),
            base: 0,
            clients: patiences.iter().enumerate().map(client).collect(),
            last_token: 0,
            violation: None,
        };
        for i in 0..patiences.len() {
            world.feed(i, Input::Start);
        }
        world
    }

    pub fn actions(&self) -> Vec<Action> {
        let mut actions = Vec::new();
        if self.violation.is_some() {
            return actions;
        }
        let truth = self.truth();
        for (i, client) in self.clients.iter().enumerate() {
            if client.contender.is_ended() {
                continue;
            }
            match &client.running {
                Some(Running { op, outcome: None }) if is_write(op) && !client.is_expired => {
                    actions.push(Action::Execute(i));
                }
                Some(Running { op, .. }) if !is_write(op) => actions.push(Action::Answer(i)),
                _ => {}
            }
            if client.applied < self.end() {
                actions.push(Action::Advance(i));
            }
            if !client.signals.is_empty() {
                actions.push(Action::Hear(i));
            }
            if client.is_expired {
                actions.push(Action::Learn(i));
                continue;
            }
            if self.budget.breaks > 0 {
                for (is_server_ahead, is_failure_first) in [(false, true), (true, true), (true, false)] {
                    actions.push(Action::Break { client: i, is_server_ahead, is_failure_first });
                }
            }
            if client.contender.is_holding() || !client.is_abandoned && self.budget.abandons > 0 {
                actions.push(Action::Abandon(i));
            }
            if self.budget.expiries > 0 {
                actions.push(Action::Expire(i));
            }
            if truth.node_of(i).is_some() {
                if self.budget.deletions > 0 {
                    actions.push(Action::Delete(i));
                }
                if self.budget.touches > 0 {
                    actions.push(Action::Touch(i));
                }
            }
        }
        if self.budget.deletions > 0 && truth.has_parent {
            actions.push(Action::DeleteAll);
        }
        if self.budget.foreigners > 0 && truth.has_parent {
            actions.push(Action::Join);
        }
        if truth.node_of(FOREIGN).is_some() {
            actions.push(Action::Part);
        }
        actions
    }

    pub fn act(&mut self, action: &Action) {
        match *action {
            Action::Execute(i) => self.execute(i),
            Action::Answer(i) => self.answer(i),
            Action::Advance(i) => self.advance(i),
            Action::Hear(i) => {
                let signal = self.clients[i].signals.remove(0);
                self.feed(i, signal);
            }
            Action::Break { client, is_server_ahead, is_failure_first } => {
                self.budget.breaks -= 1;
                self.break_off(client, is_server_ahead, is_failure_first);
            }
            Action::Abandon(i) => {
                if !self.clients[i].contender.is_holding() {
                    self.budget.abandons -= 1;
                }
                self.clients[i].is_abandoned = true;
                self.feed(i, Input::Abandon);
            }
            Action::Expire(i) => {
                self.budget.expiries -= 1;
                self.clients[i].is_expired = true;
                self.delete_where(|child| child.owner == i);
            }
            Action::Learn(i) => self.feed(i, Input::SessionOver),
            Action::Delete(i) => {
                self.budget.deletions -= 1;
                self.delete_where(|child| child.owner == i);
            }
            Action::DeleteAll => {
                self.budget.deletions -= 1;
                while let Some(first) = self.truth().children.first().map(|child| child.node.clone()) {
                    self.delete_where(|child| child.node == first);
                }
                let mut tree = self.truth().clone();
                (tree.has_parent, tree.next_sequence) = (false, 0);
                self.commit(Transaction::DeleteParent, tree);
            }
            Action::Touch(i) => {
                self.budget.touches -= 1;
                if let Some(child) = self.truth().node_of(i) {
                    let (touch, tree) = (Transaction::Touch(child.node.name.clone()), self.truth().clone());
                    self.commit(touch, tree);
                }
            }
            Action::Join => {
                self.budget.foreigners -= 1;
                self.create("x__lock__".into(), FOREIGN);
            }
            Action::Part => self.delete_where(|child| child.owner == FOREIGN),
        }
        self.check();
        self.forget();
    }

    /// Everything that is under way is answered, and holders release, until nothing moves any more.
    pub fn settle(&mut self) {
        loop {
            match self.actions().into_iter().find(|action| self.is_progress(action)) {
                Some(action) => self.act(&action),
                None => return,
            }
        }
    }

    /// Whether the action is neither a mishap nor a caller's whim.
    fn is_progress(&self, action: &Action) -> bool {
        match action {
            Action::Execute(_) | Action::Answer(_) | Action::Advance(_) | Action::Hear(_) => true,
            Action::Learn(_) | Action::Part => true,
            Action::Abandon(i) => self.clients[*i].contender.is_holding(),
            _ => false,
        }
    }

    /// Whether nothing of anybody is left.
    pub fn is_empty(&self) -> bool {
        self.truth().children.is_empty()
    }

    /// The client that holds the lock, in truth.
    pub fn holder(&self) -> Option<usize> {
        (0..self.clients.len()).find(|&i| self.is_live_holder(i))
    }

    pub fn transactions_so_far(&self) -> i64 {
        self.base + self.transactions.len() as i64
    }

    fn truth(&self) -> &Tree {
        &self.history[self.end()]
    }

    fn end(&self) -> usize {
        self.history.len() - 1
    }

    fn commit(&mut self, transaction: Transaction, tree: Tree) {
        self.transactions.push(transaction);
        self.history.push(tree);
    }

    fn create(&mut self, prefix: String, owner: usize) -> Node {
        let mut tree = self.truth().clone();
        let node = Node { name: format!("{prefix}{:010}", tree.next_sequence), czxid: self.transactions_so_far() + 1 };
        tree.next_sequence += 1;
        tree.children.push(Child { node: node.clone(), owner });
        self.commit(Transaction::Create { owner }, tree);
        node
    }

    fn delete_where(&mut self, is_gone: impl Fn(&Child) -> bool) {
        let mut tree = self.truth().clone();
        let gone: Vec<String> =
            tree.children.iter().filter(|child| is_gone(child)).map(|child| child.node.name.clone()).collect();
        if !gone.is_empty() {
            tree.children.retain(|child| !is_gone(child));
            self.commit(Transaction::Delete(gone), tree);
        }
    }

    fn execute(&mut self, i: usize) {
        let Some(running) = self.clients[i].running.clone() else { return };
        let answer = match &running.op {
            Op::Create if !self.truth().has_parent => Input::NoParent,
            Op::Create => {
                let prefix = self.clients[i].contender.tag().prefix();
                let node = self.create(prefix, i);
                let is_alone = self.rules.is_fast && self.truth().children.len() == 1;
                Input::Created { node, is_alone }
            }
            Op::MakeParents => {
                if !self.truth().has_parent {
                    let tree = Tree { has_parent: true, ..Tree::default() };
                    self.commit(Transaction::MakeParent, tree);
                }
                Input::ParentsMade
            }
            Op::Remove(node) | Op::Release(node) if !self.truth().has(&node.name) => Input::NoNode,
            Op::Remove(node) => {
                self.delete_where(|child| child.node.name == node.name);
                Input::Removed
            }
            Op::Release(node) => {
                let mut tree = self.truth().clone();
                tree.children.retain(|child| child.node.name != node.name);
                self.commit(Transaction::Release(node.name.clone()), tree);
                Input::Removed
            }
            read => unreachable!("{read:?} is no write"),
        };
        let outcome = (self.end(), answer);
        self.clients[i].running = Some(Running { outcome: Some(outcome), ..running });
        self.answer_write(i);
    }

    /// A write is answered at the moment at which the client's server has applied it.
    fn answer_write(&mut self, i: usize) {
        let client = &mut self.clients[i];
        if let Some(Running { outcome: Some((at, answer)), .. }) = &client.running
            && client.applied >= *at
        {
            let answer = answer.clone();
            client.running = None;
            self.feed(i, answer);
        }
    }

    fn answer(&mut self, i: usize) {
        if self.clients[i].running.as_ref().is_some_and(|running| running.op == Op::Recover)
            && self.rules.flaw != Some(Flaw::NoSync)
        {
            while self.clients[i].applied < self.end() {
                self.advance(i);
            }
        }
        let Some(running) = self.clients[i].running.take() else { return };
        let tree = self.history[self.clients[i].applied].clone();
        let answer = match &running.op {
            Op::Recover if self.rules.flaw == Some(Flaw::BlindCreate) => Input::Recovered(Vec::new()),
            Op::Recover | Op::List if !tree.has_parent => Input::NoParent,
            Op::Recover => Input::Recovered(
                tree.children.iter().filter(|child| child.owner == i).map(|child| child.node.clone()).collect(),
            ),
            Op::List => Input::Listed(Arc::new(Queue::new(tree.children.iter().map(|child| &child.node.name)).0)),
            Op::Watch(Watch::Data(name) | Watch::Children(name)) if self.local(name).is_some() => {
                self.clients[i].local = self.local(name);
                Input::Queued
            }
            Op::Watch(watch) => match tree.has_watched(watch) {
                true => Input::Armed,
                false => Input::NoNode,
            },
            Op::Verify(node) => Input::Verified(tree.children.iter().any(|child| child.node == *node)),
            write => unreachable!("{write:?} is no read"),
        };
        if answer == Input::Armed {
            let client = &mut self.clients[i];
            match running.op {
                Op::Watch(Watch::Data(name)) => client.watched_data = Some(name),
                Op::Watch(Watch::Children(name)) => client.watched_children = Some(name),
                Op::Watch(Watch::Own(node)) => client.watched_own = Some(node.name),
                _ => {}
            }
        }
        let is_queued = answer == Input::Queued;
        self.feed(i, answer);
        if is_queued && let Some(local) = self.clients[i].local {
            self.feed(local, Input::Followed);
        }
    }

    fn advance(&mut self, i: usize) {
        self.clients[i].applied += 1;
        let at = self.clients[i].applied;
        let zxid = if self.rules.tells_zxid { self.base + at as i64 } else { NO_ZXID };
        match self.transactions[at - 1].clone() {
            Transaction::MakeParent | Transaction::DeleteParent | Transaction::Create { .. } => {}
            Transaction::Delete(names) => {
                for name in names {
                    self.tell_of_deletion(i, &name, zxid);
                }
            }
            Transaction::Release(name) => {
                self.tell_of_change(i, &name, zxid);
                self.tell_of_deletion(i, &name, zxid);
            }
            Transaction::Touch(name) => self.tell_of_change(i, &name, zxid),
        }
        self.answer_write(i);
    }

    fn tell_of_change(&mut self, i: usize, name: &str, zxid: i64) {
        self.tell_of_own(i, name);
        if self.clients[i].watched_data.take_if(|watched| watched == name).is_some() {
            self.feed(i, Input::Changed(zxid));
            if self.rules.flaw == Some(Flaw::ChangeIsDeletion) {
                self.feed(i, Input::Gone(zxid));
            }
        }
    }

    fn tell_of_deletion(&mut self, i: usize, name: &str, zxid: i64) {
        self.tell_of_own(i, name);
        let client = &mut self.clients[i];
        let is_told = client.watched_data.take_if(|watched| watched == name).is_some();
        if client.watched_children.take_if(|watched| watched == name).is_some() || is_told {
            if self.rules.flaw == Some(Flaw::GoneIsRelease) {
                self.feed(i, Input::Changed(zxid));
            }
            self.feed(i, Input::Gone(zxid));
        }
    }

    fn tell_of_own(&mut self, i: usize, name: &str) {
        if self.clients[i].watched_own.take_if(|watched| watched == name).is_some()
            && self.rules.flaw != Some(Flaw::NoOwnWatch)
        {
            self.feed(i, Input::OwnTouched);
        }
    }

    fn break_off(&mut self, i: usize, is_server_ahead: bool, is_failure_first: bool) {
        if is_failure_first && self.clients[i].running.take().is_some() {
            self.feed(i, Input::Unknown);
        }
        if self.rules.flaw != Some(Flaw::NoVoid) {
            self.feed(i, Input::Reconnected);
        }
        if is_server_ahead {
            // The new server compares what is watched with what it has, and makes up for what was missed.
            self.clients[i].applied = self.end();
            let client = &self.clients[i];
            for name in [&client.watched_data, &client.watched_children, &client.watched_own].map(Clone::clone) {
                if let Some(name) = name
                    && !self.truth().has(&name)
                {
                    self.tell_of_deletion(i, &name, NO_ZXID);
                }
            }
        }
        // What an event did not already replace.
        if !is_failure_first && self.clients[i].running.as_ref().is_some_and(|running| running.outcome.is_some()) {
            self.clients[i].running = None;
            self.feed(i, Input::Unknown);
        }
    }

    /// As the driver does it.
    fn feed(&mut self, i: usize, input: Input) {
        if self.clients[i].contender.is_ended() {
            return;
        }
        let mut ops = Vec::new();
        let client = &mut self.clients[i];
        let is_waiting = client.contender.is_waiting();
        if matches!(input, Input::Changed(_) | Input::Gone(_) | Input::Next | Input::Passed | Input::Left)
            && !is_waiting
        {
            // The driver has dropped the watch.
            return;
        }
        client.contender.handle(input, &mut ops);
        for op in ops {
            if op == Op::Create {
                // To those who wait for the node that it had.
                self.signal(i, Input::Left);
            }
            let client = &mut self.clients[i];
            match &op {
                Op::Create => {
                    client.watched_own = None;
                    client.forget_predecessor();
                }
                Op::Watch(Watch::Children(_) | Watch::Own(_)) | Op::Tell(_) => {}
                Op::Watch(Watch::Data(_)) => {}
                _ => client.forget_predecessor(),
            }
            match op {
                Op::Tell(tell) => {
                    if let Tell::Granted(node) = &tell {
                        client.forget_predecessor();
                        client.running = None;
                        let node = node.clone();
                        self.granted(i, &node);
                        if !self.rules.is_compact {
                            self.signal(i, Input::Next);
                        }
                    }
                    self.clients[i].told.push(tell);
                }
                // What was sent is not taken back.
                op => {
                    self.send_off(i);
                    self.clients[i].running = Some(Running { op, outcome: None });
                }
            }
        }
        if self.clients[i].contender.is_ended() {
            self.send_off(i);
            self.clients[i].forget_predecessor();
            self.clients[i].watched_own = None;
            // A compact name may have come again, so it says too little.
            let has_passed =
                matches!(self.clients[i].told.last(), Some(Tell::Released | Tell::Lost(_))) && !self.rules.is_compact;
            self.signal(i, if has_passed { Input::Passed } else { Input::Left });
        }
    }

    /// Which client of the session has the node with this name.
    fn local(&self, name: &str) -> Option<usize> {
        let has_it = |client: &Client| client.contender.node().is_some_and(|node| node.name == name);
        self.rules.is_shared.then(|| self.clients.iter().position(has_it))?
    }

    fn signal(&mut self, from: usize, signal: Input) {
        for client in self.clients.iter_mut().filter(|client| client.local == Some(from)) {
            client.signals.push(signal.clone());
        }
    }

    fn send_off(&mut self, i: usize) {
        if let Some(Running { op: Op::MakeParents | Op::Create, outcome: None }) = self.clients[i].running
            && !self.clients[i].is_expired
        {
            let contender = self.clients[i].contender.clone();
            self.execute(i);
            self.clients[i].contender = contender;
        }
        self.clients[i].running = None;
    }

    fn granted(&mut self, i: usize, node: &Node) {
        if !self.history[self.clients[i].applied].has(&node.name) {
            self.violated("a grant is given after the contender's own node was deleted");
        }
        if self.is_live(i, node) {
            if node.czxid <= self.last_token {
                self.violated("tokens rise from holder to holder");
            }
            self.last_token = node.czxid;
        }
    }

    fn is_live(&self, i: usize, node: &Node) -> bool {
        !self.clients[i].is_expired && self.truth().children.iter().any(|child| child.node == *node)
    }

    fn is_live_holder(&self, i: usize) -> bool {
        let contender = &self.clients[i].contender;
        contender.is_holding() && contender.node().is_some_and(|node| self.is_live(i, node))
    }

    fn violated(&mut self, sentence: &'static str) {
        self.violation.get_or_insert(sentence);
    }

    fn check(&mut self) {
        let truth = self.truth().clone();
        let lowest = truth.children.iter().min_by_key(|child| Entry::parse(&child.node.name).map(|e| e.sequence));
        for i in 0..self.clients.len() {
            let client = &self.clients[i];
            if self.is_live_holder(i) && lowest.map(|child| &child.node) != client.contender.node() {
                self.violated("the holder is the first in the queue, so there is one at most");
            }
            let client = &self.clients[i];
            let watched = client.watched_children.as_ref().or(client.watched_data.as_ref());
            let is_idle = client.running.is_none() && client.applied == self.end() && !client.is_expired;
            if is_idle
                && client.local.is_none()
                && client.contender.is_waiting()
                && !watched.is_some_and(|name| truth.has(name))
            {
                self.violated("nobody waits for a node that is gone");
            }
            let client = &self.clients[i];
            if client.contender.is_ended() && !client.is_expired && truth.node_of(i).is_some() {
                self.violated("no node outlives its contender");
            }
        }
        let is_stuck = !self.actions().iter().any(|action| self.is_progress(action));
        if is_stuck && self.clients.iter().any(|client| !client.contender.is_ended()) {
            self.violated("everybody comes to their end");
        }
    }

    /// What no server is in any more does not matter.
    fn forget(&mut self) {
        let live = self.clients.iter().filter(|client| !client.contender.is_ended());
        let oldest = live.map(|client| client.applied).min().unwrap_or(self.end());
        self.history.drain(..oldest);
        self.transactions.drain(..oldest);
        self.base += oldest as i64;
        for client in &mut self.clients {
            client.applied = client.applied.saturating_sub(oldest);
            if let Some(Running { outcome: Some((at, _)), .. }) = &mut client.running {
                *at = at.saturating_sub(oldest);
            }
        }
    }
}

impl Client {
    fn forget_predecessor(&mut self) {
        (self.watched_data, self.watched_children, self.local) = (None, None, None);
        self.signals.clear();
    }
}

impl Tree {
    fn has(&self, name: &str) -> bool {
        self.children.iter().any(|child| child.node.name == name)
    }

    /// Of our own node we know more than the name.
    fn has_watched(&self, watch: &Watch) -> bool {
        match watch {
            Watch::Data(name) | Watch::Children(name) => self.has(name),
            Watch::Own(node) => self.children.iter().any(|child| child.node == *node),
        }
    }

    fn node_of(&self, owner: usize) -> Option<&Child> {
        self.children.iter().find(|child| child.owner == owner)
    }
}

fn is_write(op: &Op) -> bool {
    matches!(op, Op::Create | Op::MakeParents | Op::Remove(_) | Op::Release(_))
}
