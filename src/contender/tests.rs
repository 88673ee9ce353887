//! The machine against a small simulated server: every answer can be lost before or after the request took effect,
//! callers go at any moment, operators delete nodes, sessions end.

use proptest::prelude::*;

use super::*;

/// The server's side: the children of the lock's node in the order of their creation.
#[derive(Default)]
struct Server {
    has_parent: bool,
    children: Vec<Node>,
    next_sequence: i64,
    zxid: i64,
}

impl Server {
    fn create(&mut self, tag: &Tag) -> Input {
        if !self.has_parent {
            return Input::NoParent;
        }
        self.zxid += 1;
        let node = Node { name: format!("{}{:010}", tag.prefix(), self.next_sequence), czxid: self.zxid };
        self.next_sequence += 1;
        self.children.push(node.clone());
        Input::Created(node)
    }

    fn has(&self, node: &Node) -> bool {
        self.children.contains(node)
    }

    fn remove(&mut self, node: &Node) -> Input {
        let before = self.children.len();
        self.children.retain(|child| child.name != node.name);
        if self.children.len() < before { Input::Removed } else { Input::NoNode }
    }

    fn nodes_of(&self, tag: &Tag) -> Vec<Node> {
        self.children.iter().filter(|child| tag.is_of(&child.name)).cloned().collect()
    }

    fn apply(&mut self, op: &Op, tag: &Tag) -> Input {
        match op {
            Op::Create => self.create(tag),
            Op::MakeParents => {
                // The numbers start again with a new parent.
                if !self.has_parent {
                    (self.has_parent, self.next_sequence) = (true, 0);
                }
                Input::ParentsMade
            }
            Op::Recover | Op::List if !self.has_parent => Input::NoParent,
            Op::Recover => Input::Recovered(self.nodes_of(tag)),
            Op::List => Input::Listed(Queue::new(self.children.iter().map(|child| &child.name)).0),
            Op::Watch(name) => match self.children.iter().any(|child| child.name == *name) {
                true => Input::Armed,
                false => Input::NoNode,
            },
            Op::Remove(node) => self.remove(node),
            Op::Verify(node) => Input::Verified(self.has(node)),
            Op::Tell(_) => unreachable!("not a request"),
        }
    }
}

/// One acquisition, with the request that is under way and what its caller was told.
struct Client {
    contender: Contender,
    running: Option<Op>,
    watching: Option<String>,
    told: Vec<Tell>,
    is_abandoned: bool,
}

impl Client {
    fn new(number: usize, patience: Patience) -> Self {
        let tag = Tag::named(&number.to_string());
        let contender = Contender::new(tag, Kind::Exclusive, patience);
        let mut client = Self { contender, running: None, watching: None, told: Vec::new(), is_abandoned: false };
        client.take(Input::Start, &mut Server::default());
        client
    }

    /// A request that is under way when something else is asked for, or when all is over, is not taken back: it
    /// still reaches the server, before any later one of the session.
    fn take(&mut self, input: Input, server: &mut Server) {
        let mut ops = Vec::new();
        self.contender.handle(input, &mut ops);
        for op in ops {
            match op {
                Op::Tell(tell) => self.told.push(tell),
                request => {
                    self.send_off(server);
                    self.running = Some(request);
                }
            }
        }
        if self.contender.is_ended() {
            self.send_off(server);
        }
    }

    fn send_off(&mut self, server: &mut Server) {
        self.watching = None;
        if let Some(op) = self.running.take() {
            server.apply(&op, self.contender.tag());
        }
    }

    /// The running request reaches the server; its answer arrives or is lost.
    fn step(&mut self, server: &mut Server, fate: Fate) {
        let Some(op) = self.running.take() else { return };
        let answer = match fate {
            Fate::LostBefore => Input::Unknown,
            Fate::Answered | Fate::LostAfter => server.apply(&op, self.contender.tag()),
        };
        match (fate, answer) {
            (Fate::Answered, Input::Armed) => {
                self.take(Input::Armed, server);
                self.watching = Some(watched(op));
            }
            (Fate::Answered, answer) => self.take(answer, server),
            (Fate::LostBefore | Fate::LostAfter, _) => self.take(Input::Unknown, server),
        }
    }

    fn wake(&mut self, server: &mut Server) {
        if let Some(name) = &self.watching
            && !server.children.iter().any(|child| child.name == *name)
        {
            self.watching = None;
            self.take(Input::Woken, server);
        }
    }

    fn abandon(&mut self, server: &mut Server) {
        self.is_abandoned = true;
        if !self.contender.is_ended() {
            self.take(Input::Abandon, server);
        }
    }
}

fn watched(op: Op) -> String {
    match op {
        Op::Watch(name) => name,
        other => panic!("{other:?} is no watch"),
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Answered,
    LostBefore,
    LostAfter,
}

#[derive(Clone, Debug)]
enum Step {
    Request(usize, Fate),
    Wake(usize),
    Abandon(usize),
    TimeUp(usize),
    SessionOver(usize),
    DeleteNode(usize),
    DeleteParent,
}

const CLIENTS: usize = 4;

fn any_step() -> impl Strategy<Value = Step> {
    let client = 0..CLIENTS;
    prop_oneof![
        20 => client.clone().prop_map(|i| Step::Request(i, Fate::Answered)),
        2 => client.clone().prop_map(|i| Step::Request(i, Fate::LostBefore)),
        4 => client.clone().prop_map(|i| Step::Request(i, Fate::LostAfter)),
        10 => client.clone().prop_map(Step::Wake),
        3 => client.clone().prop_map(Step::Abandon),
        1 => client.clone().prop_map(Step::TimeUp),
        1 => client.clone().prop_map(Step::SessionOver),
        1 => client.prop_map(Step::DeleteNode),
        1 => Just(Step::DeleteParent),
    ]
}

fn holders(clients: &[Client], server: &Server) -> Vec<usize> {
    let holds = |client: &Client| client.contender.is_holding() && server.has(client.contender.node().expect("a node"));
    (0..clients.len()).filter(|&i| holds(&clients[i])).collect()
}

/// Lets everything that is under way be answered, and holders release, until nothing moves any more.
fn settle(clients: &mut [Client], server: &mut Server) {
    loop {
        let mut has_moved = false;
        for client in clients.iter_mut() {
            client.wake(server);
            if client.contender.is_holding() {
                client.take(Input::Abandon, server);
            }
            has_moved |= client.running.is_some();
            client.step(server, Fate::Answered);
        }
        if !has_moved {
            return;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn one_holder_at_most_no_orphan_no_sleeper(
        tries in prop::collection::vec(any::<bool>(), CLIENTS),
        steps in prop::collection::vec(any_step(), 0..120),
    ) {
        let mut server = Server::default();
        let mut clients: Vec<Client> = tries
            .iter()
            .enumerate()
            .map(|(i, is_try)| Client::new(i, if *is_try { Patience::Try } else { Patience::Wait }))
            .collect();
        for step in steps {
            match step {
                Step::Request(i, fate) => clients[i].step(&mut server, fate),
                Step::Wake(i) => clients[i].wake(&mut server),
                Step::Abandon(i) => clients[i].abandon(&mut server),
                Step::TimeUp(i) if !clients[i].contender.is_ended() => clients[i].take(Input::TimeUp, &mut server),
                Step::TimeUp(_) => {}
                Step::SessionOver(i) => {
                    if !clients[i].contender.is_ended() {
                        clients[i].take(Input::SessionOver, &mut server);
                    }
                    let tag = clients[i].contender.tag().clone();
                    server.children.retain(|child| !tag.is_of(&child.name));
                }
                Step::DeleteNode(i) => {
                    if let Some(node) = clients[i].contender.node().cloned() {
                        server.remove(&node);
                    }
                }
                Step::DeleteParent => {
                    server.children.clear();
                    server.has_parent = false;
                }
            }
            prop_assert!(holders(&clients, &server).len() <= 1, "two holders");
            for client in clients.iter().filter(|client| client.contender.is_ended()) {
                prop_assert!(server.nodes_of(client.contender.tag()).is_empty(), "an orphan: {:?}", client.told);
            }
        }
        settle(&mut clients, &mut server);
        for client in &clients {
            prop_assert!(client.contender.is_ended(), "a sleeper: {:?}", client.contender);
            let told = client.told.iter().filter(|tell| !matches!(tell, Tell::Requeued)).count();
            // Granted and then how the hold ended; or one reason why not; or nothing, to a caller that went.
            let is_granted = client.told.iter().any(|tell| matches!(tell, Tell::Granted(_)));
            prop_assert!(told == if is_granted { 2 } else { 1 } || client.is_abandoned && told == 0, "{:?}", client.told);
        }
        prop_assert_eq!(server.children.len(), 0, "an orphan");
    }
}

/// A client whose requests are all answered, up to the point where it has to wait or holds.
fn run(client: &mut Client, server: &mut Server) {
    while client.running.is_some() {
        client.step(server, Fate::Answered);
    }
}

#[test]
fn waiters_are_granted_in_the_order_of_their_nodes() {
    let mut server = Server::default();
    let mut clients: Vec<Client> = (0..5).map(|i| Client::new(i, Patience::Wait)).collect();
    for client in &mut clients {
        run(client, &mut server);
    }
    for i in 0..clients.len() {
        assert_eq!(holders(&clients, &server), [i]);
        clients[i].abandon(&mut server);
        run(&mut clients[i], &mut server);
        assert_eq!(clients[i].told.last(), Some(&Tell::Released));
        for client in &mut clients[i + 1..] {
            client.wake(&mut server);
            run(client, &mut server);
        }
    }
}

#[test]
fn a_try_that_would_be_in_vain_writes_nothing() {
    let mut server = Server::default();
    let mut holder = Client::new(0, Patience::Wait);
    run(&mut holder, &mut server);
    let before = server.zxid;
    let mut other = Client::new(1, Patience::Try);
    run(&mut other, &mut server);
    assert_eq!(other.told, [Tell::WouldBlock]);
    assert_eq!(server.zxid, before);
}

#[test]
fn a_create_without_an_answer_is_found_and_not_repeated() {
    let mut server = Server { has_parent: true, ..Server::default() };
    let mut client = Client::new(0, Patience::Wait);
    client.step(&mut server, Fate::LostAfter);
    assert_eq!(client.running, Some(Op::Recover));
    run(&mut client, &mut server);
    assert_eq!(holders(std::slice::from_ref(&client), &server), [0]);
    assert_eq!(server.children.len(), 1);
}

#[test]
fn of_two_nodes_of_one_attempt_the_older_is_kept() {
    let mut server = Server { has_parent: true, ..Server::default() };
    let mut client = Client::new(0, Patience::Wait);
    client.step(&mut server, Fate::LostAfter);
    let Input::Created(younger) = server.create(&client.contender.tag().clone()) else { panic!("no parent") };
    run(&mut client, &mut server);
    assert!(client.contender.is_holding());
    assert!(!server.has(&younger));
    assert_eq!(server.children.len(), 1);
}

#[test]
fn a_release_whose_answer_is_lost_is_no_loss() {
    let mut server = Server::default();
    let mut client = Client::new(0, Patience::Wait);
    run(&mut client, &mut server);
    client.abandon(&mut server);
    client.step(&mut server, Fate::LostAfter);
    run(&mut client, &mut server);
    assert_eq!(client.told.last(), Some(&Tell::Released));
}

#[test]
fn a_release_without_effect_is_repeated() {
    let mut server = Server::default();
    let mut client = Client::new(0, Patience::Wait);
    run(&mut client, &mut server);
    client.abandon(&mut server);
    client.step(&mut server, Fate::LostBefore);
    assert_eq!(server.children.len(), 1);
    run(&mut client, &mut server);
    assert_eq!(client.told.last(), Some(&Tell::Released));
    assert_eq!(server.children.len(), 0);
}

#[test]
fn a_holder_whose_node_was_deleted_is_told_at_its_release() {
    let mut server = Server::default();
    let mut client = Client::new(0, Patience::Wait);
    run(&mut client, &mut server);
    server.children.clear();
    client.abandon(&mut server);
    run(&mut client, &mut server);
    assert!(matches!(client.told.last(), Some(Tell::Lost(_))));
}

#[test]
fn numbers_near_their_end_are_refused_and_leave_no_node() {
    for sequence in [LAST_SEQUENCE + 1, i64::from(i32::MAX), -1, i64::from(i32::MIN)] {
        let mut server = Server { has_parent: true, next_sequence: sequence, ..Server::default() };
        let mut client = Client::new(0, Patience::Wait);
        run(&mut client, &mut server);
        assert_eq!(client.told, [Tell::Failed(Cause::SequenceExhausted)], "{sequence}");
        assert_eq!(server.children.len(), 0);
    }
}

#[test]
fn a_create_that_always_breaks_the_connection_ends_in_an_error() {
    let mut server = Server { has_parent: true, ..Server::default() };
    let mut client = Client::new(0, Patience::Wait);
    for _ in 0..LOST_CREATES {
        assert_eq!(client.running, Some(Op::Create));
        client.step(&mut server, Fate::LostBefore);
        client.step(&mut server, Fate::Answered);
    }
    assert_eq!(client.told, [Tell::Failed(Cause::Unanswered)]);
}

#[test]
fn a_refused_request_takes_the_node_out_of_the_queue() {
    let mut server = Server { has_parent: true, ..Server::default() };
    let mut client = Client::new(0, Patience::Wait);
    client.step(&mut server, Fate::Answered);
    assert_eq!(client.running, Some(Op::List));
    client.take(Input::Refused, &mut server);
    run(&mut client, &mut server);
    assert_eq!(client.told, [Tell::Failed(Cause::Refused)]);
    assert_eq!(server.children.len(), 0);
}
