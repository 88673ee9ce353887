//! A long, slow or broken wire to a server.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy, sink};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};

use crate::background::{lock, runtime, sleep_until};
use crate::fault::{Armed, Fault, How, Rule, Rules};
use crate::request::{Frame, Frames, Request, answers};

/// A TCP proxy on the loopback, in front of a server, which delays, cuts or silences: all at once, or at a certain
/// request, see [`Proxy::arm`].
///
/// Bytes keep their order, and requests that are sent without waiting overlap on the way, as on a
/// long wire: with 5 ms one way, each round trip that a client waits for costs it 10 ms. Dropping it
/// closes its connections.
pub struct Proxy {
    addr: String,
    wire: Arc<Wire>,
    /// Bound and never listening: keeps the port ours while the proxy refuses connections.
    _port: TcpSocket,
}

/// What has passed a [`Proxy`]: up is towards the server, down is towards the client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Connections that were accepted.
    pub connections: u64,
    /// Bytes of the client's.
    pub up_bytes: u64,
    /// Pieces in which they were read; more or less the client's requests while it waits for each.
    pub up_chunks: u64,
    /// Bytes of the server's.
    pub down_bytes: u64,
    /// Pieces in which they were read.
    pub down_chunks: u64,
}

impl Proxy {
    /// Starts a proxy to an address, `host:port`.
    ///
    /// # Panics
    ///
    /// If no port of the loopback can be had.
    pub async fn start(target: &str) -> Proxy {
        let (_port, addr, listener) = runtime()
            .spawn(async {
                let port = bound_to("127.0.0.1:0")?;
                let addr = port.local_addr()?.to_string();
                let listener = listen(&addr)?;
                Ok::<_, io::Error>((port, addr, listener))
            })
            .await
            .expect("no panic in binding a port")
            .expect("a port of the loopback");
        let wire = Arc::new(Wire::new(target));
        runtime().spawn(Arc::clone(&wire).accept(addr.clone(), listener));
        Proxy { addr, wire, _port }
    }

    /// Where to connect to, `127.0.0.1:port`.
    pub fn addr(&self) -> &str {
        &self.addr
    }

    /// Delays what is sent from now on by this time each way. A round trip takes twice that.
    pub fn delay(&self, one_way: Duration) {
        self.wire.delay_nanos.store(one_way.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Closes all connections, and refuses new ones until [`Proxy::restore`]. Has done so on return.
    pub fn cut(&self) {
        self.wire.set(State::Cut);
        self.wire.wait_until(|wire| wire.open.load(Ordering::Acquire) == 0 && !wire.listening.load(Ordering::Acquire));
    }

    /// Closes all connections; new ones are accepted.
    pub fn reset(&self) {
        let before = *self.wire.state.borrow();
        self.cut();
        self.wire.set(before);
        self.wire.wait_until(|wire| wire.listening.load(Ordering::Acquire) || before == State::Cut);
    }

    /// Keeps all connections, accepts new ones, and swallows all that is sent, both ways.
    pub fn silence(&self) {
        self.wire.set(State::Silent { up: true, down: true });
    }

    /// Swallows all that the server sends. What the client sends still arrives and has its effect.
    pub fn silence_answers(&self) {
        self.wire.set(State::Silent { up: false, down: true });
    }

    /// Works again. Connections of which something was swallowed are closed: a byte that is missing
    /// in the middle would be a fault which no network has.
    pub fn restore(&self) {
        self.wire.set(State::Open);
        self.wire.wait_until(|wire| wire.listening.load(Ordering::Acquire));
    }

    /// Has a fault happen at a request that the closure picks, on whichever connection it comes.
    ///
    /// ```no_run
    /// # async fn example(proxy: zklock_support::Proxy) {
    /// use zklock_support::{Fault, Op};
    ///
    /// // The second delete from now on has its effect, and the client is not told.
    /// let rule = proxy.arm(Fault::reset().at_answer().nth(2), |request| request.op == Op::Delete);
    /// // ... provoke it ...
    /// rule.fired().await;
    /// # }
    /// ```
    ///
    /// Where several rules are due at a request, it is for the one that was armed first.
    pub fn arm(&self, fault: Fault, picks: impl Fn(&Request) -> bool + Send + Sync + 'static) -> Rule {
        self.wire.rules.arm(fault, picks)
    }

    /// What has passed so far, swallowed or not.
    pub fn traffic(&self) -> Traffic {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Traffic {
            connections: read(&self.wire.connections),
            up_bytes: read(&self.wire.up.bytes),
            up_chunks: read(&self.wire.up.chunks),
            down_bytes: read(&self.wire.down.bytes),
            down_chunks: read(&self.wire.down.chunks),
        }
    }
}

impl Traffic {
    /// What has passed since an earlier look.
    pub fn since(&self, earlier: &Traffic) -> Traffic {
        Traffic {
            connections: self.connections - earlier.connections,
            up_bytes: self.up_bytes - earlier.up_bytes,
            up_chunks: self.up_chunks - earlier.up_chunks,
            down_bytes: self.down_bytes - earlier.down_bytes,
            down_chunks: self.down_chunks - earlier.down_chunks,
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.wire.set(State::Gone);
    }
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Proxy({} -> {}, {:?})", self.addr, self.wire.target, *self.wire.state.borrow())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    Silent { up: bool, down: bool },
    Cut,
    Gone,
}

impl State {
    fn accepts(self) -> bool {
        matches!(self, State::Open | State::Silent { .. })
    }
}

/// What the proxy and its connections share.
struct Wire {
    target: String,
    state: watch::Sender<State>,
    delay_nanos: AtomicU64,
    listening: AtomicBool,
    open: AtomicUsize,
    connections: AtomicU64,
    up: Way,
    down: Way,
    rules: Arc<Rules>,
}

/// One direction.
struct Way {
    is_up: bool,
    bytes: AtomicU64,
    chunks: AtomicU64,
}

impl Wire {
    fn new(target: &str) -> Wire {
        let way = |is_up| Way { is_up, bytes: AtomicU64::new(0), chunks: AtomicU64::new(0) };
        Wire {
            target: target.to_owned(),
            state: watch::Sender::new(State::Open),
            delay_nanos: AtomicU64::new(0),
            listening: AtomicBool::new(true),
            open: AtomicUsize::new(0),
            connections: AtomicU64::new(0),
            up: way(true),
            down: way(false),
            rules: Arc::default(),
        }
    }

    /// A rule may be about to do so when the proxy is dropped.
    fn set(&self, state: State) {
        self.state.send_if_modified(|now| {
            let is_alive = *now != State::Gone;
            if is_alive {
                *now = state;
            }
            is_alive
        });
    }

    /// Blocks for the moment that the proxy's own threads need to follow.
    fn wait_until(&self, done: impl Fn(&Wire) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !done(self) {
            assert!(Instant::now() < deadline, "the proxy does not follow");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    async fn accept(self: Arc<Wire>, addr: String, listener: TcpListener) {
        let mut listener = Some(listener);
        let mut state = self.state.subscribe();
        loop {
            let now = *state.borrow_and_update();
            match (&listener, now) {
                (_, State::Gone) => return,
                (Some(_), State::Cut) => {
                    listener = None;
                    self.listening.store(false, Ordering::Release);
                }
                (None, state) if state.accepts() => {
                    listener = Some(listen(&addr).expect("the port is kept for us"));
                    self.listening.store(true, Ordering::Release);
                }
                (Some(listening), _) => tokio::select! {
                    biased;
                    _ = state.changed() => {}
                    Ok((client, _)) = listening.accept() => {
                        self.connections.fetch_add(1, Ordering::Relaxed);
                        self.open.fetch_add(1, Ordering::AcqRel);
                        runtime().spawn(Arc::clone(&self).carry(client));
                    }
                },
                (None, _) => drop(state.changed().await),
            }
        }
    }

    async fn carry(self: Arc<Wire>, client: TcpStream) {
        // Both are closed before the connection is counted as gone.
        let _ = self.carry_until_closed(client).await;
        self.open.fetch_sub(1, Ordering::AcqRel);
    }

    async fn carry_until_closed(&self, mut client: TcpStream) -> io::Result<()> {
        let link = Link::new(self);
        let mut state = self.state.subscribe();
        let closed = async {
            let is_closed = |state: &State| match state {
                State::Open => link.has_lost(),
                State::Silent { .. } => false,
                State::Cut | State::Gone => true,
            };
            drop(state.wait_for(is_closed).await);
        };
        tokio::pin!(closed);
        let mut server = tokio::select! {
            () = &mut closed => return Ok(()),
            server = TcpStream::connect(&self.target) => server?,
        };
        server.set_nodelay(true)?;
        client.set_nodelay(true)?;
        let carry = async {
            let (client_out, client_in) = client.split();
            let (server_out, server_in) = server.split();
            tokio::try_join!(link.pump(&self.up, client_out, server_in), link.pump(&self.down, server_out, client_in))
        };
        let carried = tokio::select! {
            () = closed => Ok(()),
            carried = carry => carried.map(drop),
        };
        match link.broken() {
            Some(rule) => self.break_off(&rule, client, server).await,
            None => carried,
        }
    }

    async fn break_off(&self, rule: &Armed, mut client: TcpStream, mut server: TcpStream) -> io::Result<()> {
        let is_reset = rule.fault.how == How::Reset;
        for stream in [&mut client, &mut server] {
            match is_reset {
                true => stream.set_zero_linger()?,
                // It may be closed already, by the other end.
                false => drop(stream.shutdown().await),
            }
        }
        let open = (!is_reset).then_some((client, server));
        if rule.fault.until_restored {
            self.set(State::Cut);
            while self.listening.load(Ordering::Acquire) && *self.state.borrow() == State::Cut {
                sleep(Duration::from_millis(1)).await;
            }
        }
        rule.fire();
        if let Some((mut client, mut server)) = open {
            // What is closed with something left to read is reset after all.
            let (mut rest, mut answers) = (sink(), sink());
            let read = futures::future::join(copy(&mut client, &mut rest), copy(&mut server, &mut answers));
            let _ = timeout(Duration::from_secs(1), read).await;
        }
        Ok(())
    }
}

/// One connection.
struct Link<'a> {
    wire: &'a Wire,
    /// Something was swallowed.
    lost: AtomicBool,
    /// This connection is silent, whatever the others are.
    silent: watch::Sender<State>,
    /// Requests whose answers are awaited, by their numbers, and what is to be done then. The first request and the
    /// first answer have none.
    asked: Mutex<Vec<(Option<i32>, Arc<Armed>)>>,
    broken: Mutex<Option<Arc<Armed>>>,
}

/// What is on its way.
enum Piece {
    Bytes(Vec<u8>),
    /// One side has hung up.
    End,
    /// The connection breaks here.
    Break(Arc<Armed>),
}

type Pieces = mpsc::UnboundedSender<(Instant, Piece)>;

impl Link<'_> {
    fn new(wire: &Wire) -> Link<'_> {
        let silent = watch::Sender::new(State::Open);
        Link { wire, lost: AtomicBool::new(false), silent, asked: Mutex::default(), broken: Mutex::default() }
    }

    /// Whether something is missing, or will be.
    fn has_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire) || *self.silent.borrow() != State::Open
    }

    fn broken(&self) -> Option<Arc<Armed>> {
        lock(&self.broken).take()
    }

    fn swallows(&self, way: &Way) -> bool {
        let is_silent = |state| match (state, way.is_up) {
            (State::Silent { up, .. }, true) => up,
            (State::Silent { down, .. }, false) => down,
            _ => false,
        };
        is_silent(*self.wire.state.borrow()) || is_silent(*self.silent.borrow())
    }

    async fn pump(&self, way: &Way, from: ReadHalf<'_>, to: WriteHalf<'_>) -> io::Result<()> {
        let (sender, receiver) = mpsc::unbounded_channel();
        tokio::try_join!(self.take(way, from, sender), self.deliver(receiver, to)).map(drop)
    }

    async fn take(&self, way: &Way, mut from: ReadHalf<'_>, pieces: Pieces) -> io::Result<()> {
        let mut buffer = vec![0; 1 << 16];
        let mut frames = Frames::default();
        let mut is_first = true;
        loop {
            let length = from.read(&mut buffer).await?;
            way.bytes.fetch_add(length as u64, Ordering::Relaxed);
            way.chunks.fetch_add(u64::from(length > 0), Ordering::Relaxed);
            let mut passed = 0;
            for frame in frames.complete(&buffer[..length]) {
                let is_first = std::mem::take(&mut is_first);
                if let Some(rule) = self.rule_at(way, &frame, is_first) {
                    self.pass(way, &buffer[passed..frame.begin], &pieces)?;
                    passed = frame.begin;
                    self.happen(rule, &pieces).await?;
                }
            }
            if length > 0 {
                self.pass(way, &buffer[passed..length], &pieces)?;
            } else if self.swallows(way) {
                // Nor does the other side learn that this one has hung up.
                std::future::pending().await
            } else {
                return self.send(Piece::End, &pieces);
            }
        }
    }

    /// The rule that is due before this frame is passed on.
    fn rule_at(&self, way: &Way, frame: &Frame, is_first: bool) -> Option<Arc<Armed>> {
        if self.swallows(way) {
            return None;
        }
        if !way.is_up {
            let xid = if is_first { None } else { Some(answers(&frame.body)?) };
            let mut asked = lock(&self.asked);
            let position = asked.iter().position(|(asked, _)| *asked == xid)?;
            return Some(asked.swap_remove(position).1);
        }
        if self.wire.rules.is_empty() {
            return None;
        }
        let (xid, request) = match is_first {
            true => (None, Request::connect()),
            false => Request::read(&frame.body).map(|(xid, request)| (Some(xid), request))?,
        };
        let rule = self.wire.rules.due(&request)?;
        if rule.fault.at_answer {
            lock(&self.asked).push((xid, rule));
            return None;
        }
        Some(rule)
    }

    async fn happen(&self, rule: Arc<Armed>, pieces: &Pieces) -> io::Result<()> {
        match rule.fault.how {
            How::Nothing => rule.fire(),
            How::Silence { up, down } => {
                let silent = State::Silent { up, down };
                self.silent.send_replace(silent);
                if rule.fault.until_restored {
                    self.wire.set(silent);
                }
                rule.fire();
            }
            How::Hold => {
                rule.fire();
                rule.lifted().await;
            }
            How::Fin | How::Reset => {
                self.send(Piece::Break(rule), pieces)?;
                std::future::pending().await
            }
        }
        Ok(())
    }

    fn pass(&self, way: &Way, bytes: &[u8], pieces: &Pieces) -> io::Result<()> {
        match bytes {
            [] => Ok(()),
            _ if self.swallows(way) => {
                self.lost.store(true, Ordering::Release);
                match self.swallows(way) {
                    true => Ok(()),
                    // Restored in between, perhaps before it could be seen that something is lost.
                    false => Err(io::ErrorKind::ConnectionReset.into()),
                }
            }
            _ => self.send(Piece::Bytes(bytes.to_vec()), pieces),
        }
    }

    fn send(&self, piece: Piece, pieces: &Pieces) -> io::Result<()> {
        let delay = Duration::from_nanos(self.wire.delay_nanos.load(Ordering::Relaxed));
        pieces.send((Instant::now() + delay, piece)).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    /// Writes each piece when it is due.
    async fn deliver(
        &self,
        mut pieces: mpsc::UnboundedReceiver<(Instant, Piece)>,
        mut to: WriteHalf<'_>,
    ) -> io::Result<()> {
        while let Some((due, piece)) = pieces.recv().await {
            sleep_until(due).await;
            match piece {
                Piece::Bytes(bytes) => to.write_all(&bytes).await?,
                Piece::End => return to.shutdown().await,
                Piece::Break(rule) => {
                    *lock(&self.broken) = Some(rule);
                    return Err(io::ErrorKind::ConnectionAborted.into());
                }
            }
        }
        Ok(())
    }
}

impl Drop for Link<'_> {
    fn drop(&mut self) {
        for (_, rule) in lock(&self.asked).drain(..) {
            rule.is_due_again();
        }
    }
}

fn listen(addr: &str) -> io::Result<TcpListener> {
    bound_to(addr)?.listen(1024)
}

fn bound_to(addr: &str) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    // Two of our sockets share the port.
    socket.set_reuseaddr(true)?;
    socket.set_reuseport(true)?;
    socket.bind(addr.parse().map_err(io::Error::other)?)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::timeout;

    /// A proxy to a server that sends back what it gets.
    async fn echo() -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        runtime().spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut from, mut to) = stream.into_split();
                    tokio::io::copy(&mut from, &mut to).await
                });
            }
        });
        Proxy::start(&addr).await
    }

    async fn ask(client: &mut TcpStream, what: &[u8]) -> Option<Vec<u8>> {
        client.write_all(what).await.ok()?;
        let mut answer = vec![0; what.len()];
        timeout(Duration::from_millis(300), client.read_exact(&mut answer)).await.ok()?.ok()?;
        Some(answer)
    }

    async fn is_closed(client: &mut TcpStream) -> bool {
        let read = timeout(Duration::from_secs(5), client.read(&mut [0; 64])).await;
        matches!(read, Ok(Ok(0) | Err(_)))
    }

    #[tokio::test]
    async fn what_passes_is_counted_each_way() {
        let proxy = echo().await;
        let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
        let before = proxy.traffic();
        assert_eq!(ask(&mut client, b"12345").await.unwrap(), b"12345");
        let passed = proxy.traffic().since(&before);
        assert_eq!((passed.up_bytes, passed.up_chunks), (5, 1));
        assert_eq!((passed.down_bytes, passed.down_chunks), (5, 1));
    }

    #[tokio::test]
    async fn a_delay_is_paid_once_by_requests_that_do_not_wait() {
        let proxy = echo().await;
        proxy.delay(Duration::from_millis(20));
        let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
        client.set_nodelay(true).unwrap();
        let start = Instant::now();
        for n in 0..10_u8 {
            client.write_all(&[n]).await.unwrap();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let mut answer = [0; 10];
        client.read_exact(&mut answer).await.unwrap();
        let took = start.elapsed();
        assert_eq!(answer, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert!(took >= Duration::from_millis(40), "{took:?}");
        assert!(took < Duration::from_millis(200), "{took:?}");
    }

    #[tokio::test]
    async fn a_cut_closes_connections_and_refuses_new_ones_until_restored() {
        let proxy = echo().await;
        let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
        assert!(ask(&mut client, b"1").await.is_some());
        for _ in 0..3 {
            proxy.cut();
            assert!(is_closed(&mut client).await);
            let refused = TcpStream::connect(proxy.addr()).await.unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
            proxy.restore();
            client = TcpStream::connect(proxy.addr()).await.unwrap();
            assert!(ask(&mut client, b"2").await.is_some());
        }
        proxy.reset();
        assert!(is_closed(&mut client).await);
        assert!(TcpStream::connect(proxy.addr()).await.is_ok());
    }

    #[tokio::test]
    async fn silence_swallows_and_keeps_connections_until_restored() {
        let proxy = echo().await;
        let mut idle = TcpStream::connect(proxy.addr()).await.unwrap();
        let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
        assert!(ask(&mut client, b"1").await.is_some());
        assert!(ask(&mut idle, b"1").await.is_some());
        proxy.silence();
        assert_eq!(ask(&mut client, b"2").await, None);
        let mut new = TcpStream::connect(proxy.addr()).await.unwrap();
        assert_eq!(ask(&mut new, b"3").await, None);
        proxy.restore();
        assert!(is_closed(&mut client).await);
        assert!(is_closed(&mut new).await);
        assert!(ask(&mut idle, b"4").await.is_some());
    }

    #[tokio::test]
    async fn silenced_answers_are_to_requests_that_arrived() {
        let (server, mut arrived) = mpsc::unbounded_channel();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = Proxy::start(&listener.local_addr().unwrap().to_string()).await;
        runtime().spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut buffer = [0; 64];
            while let Ok(length @ 1..) = stream.read(&mut buffer).await {
                server.send(buffer[..length].to_vec()).unwrap();
                stream.write_all(&buffer[..length]).await.unwrap();
            }
        });
        let mut client = TcpStream::connect(proxy.addr()).await.unwrap();
        proxy.silence_answers();
        assert_eq!(ask(&mut client, b"5").await, None);
        assert_eq!(arrived.recv().await.unwrap(), b"5");
    }

    #[tokio::test]
    async fn a_dropped_proxy_is_gone() {
        let proxy = echo().await;
        let addr = proxy.addr().to_owned();
        let mut client = TcpStream::connect(&addr).await.unwrap();
        assert!(ask(&mut client, b"1").await.is_some());
        drop(proxy);
        assert!(is_closed(&mut client).await);
        let refused = async {
            while TcpStream::connect(&addr).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        assert!(timeout(Duration::from_secs(5), refused).await.is_ok());
    }
}
