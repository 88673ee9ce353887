//! ZooKeeper's frames, and what the requests in them ask for.

/// A client's request, as it passes a [`Proxy`](crate::Proxy).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Request {
    /// What is asked for.
    pub op: Op,
    /// The node that it is about, seen from the root: a chroot is part of it. Empty if it names none, or several.
    pub path: String,
    /// Whether it sets a watch.
    pub watches: bool,
    /// The operations of a transaction.
    pub parts: Vec<Request>,
}

/// The kinds of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Op {
    /// The first of each connection: starts a session, or goes on with one.
    Connect,
    /// Creates a node, a container included.
    Create,
    /// Deletes a node.
    Delete,
    /// Looks whether a node is there.
    Exists,
    /// Reads a node.
    GetData,
    /// Writes a node.
    SetData,
    /// Lists the children of a node, with or without the node's own data.
    GetChildren,
    /// Waits for the server to have caught up.
    Sync,
    /// Shows that the client is alive.
    Ping,
    /// Checks a node's version, in a transaction.
    Check,
    /// Several operations in one transaction.
    Multi,
    /// Lists the ephemeral nodes of the session.
    GetEphemerals,
    /// Sets the watches again after a reconnect.
    SetWatches,
    /// Authenticates.
    Auth,
    /// Ends the session.
    CloseSession,
    /// Anything else, by its number, or what could not be read.
    Other(i32),
}

impl Request {
    /// Whether it is a transaction of these operations, in this order.
    pub fn is_multi_of(&self, ops: &[Op]) -> bool {
        self.op == Op::Multi && self.parts.iter().map(|part| part.op).eq(ops.iter().copied())
    }

    /// The first request of a connection, which has no header.
    pub(crate) fn connect() -> Request {
        Request::about(Op::Connect, "", false)
    }

    /// Any other, and the number that its answer will carry.
    pub(crate) fn read(frame: &[u8]) -> Option<(i32, Request)> {
        let mut fields = Fields(frame);
        let (xid, code) = (fields.int()?, fields.int()?);
        Some((xid, fields.request(code).unwrap_or(Request::about(Op::Other(code), "", false))))
    }

    fn about(op: Op, path: &str, watches: bool) -> Request {
        Request { op, path: path.to_owned(), watches, parts: Vec::new() }
    }
}

/// The number of the request that this frame answers. Watch events have one too, that nobody asks with.
pub(crate) fn answers(frame: &[u8]) -> Option<i32> {
    Fields(frame).int()
}

/// Where the frames of one direction begin and end: the length of each, in 4 bytes, is before it.
#[derive(Default)]
pub(crate) struct Frames {
    /// Of the frame that is not complete.
    begun: Vec<u8>,
    /// It is another protocol, such as a four-letter word.
    is_opaque: bool,
}

/// A frame that a chunk completes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    /// Where in the chunk it begins, its length included; 0 if that was in an earlier one.
    pub(crate) begin: usize,
    pub(crate) body: Vec<u8>,
}

impl Frames {
    /// More than any server takes or sends.
    const LONGEST: usize = 1 << 26;

    /// The frames that are complete with this chunk.
    pub(crate) fn complete(&mut self, chunk: &[u8]) -> Vec<Frame> {
        let mut frames = Vec::new();
        if self.is_opaque {
            return frames;
        }
        let earlier = self.begun.len();
        self.begun.extend_from_slice(chunk);
        let mut begin = 0;
        while let Some(length) = self.begun[begin..].first_chunk() {
            let Some(length) = usize::try_from(i32::from_be_bytes(*length)).ok().filter(|it| *it <= Self::LONGEST)
            else {
                self.is_opaque = true;
                begin = self.begun.len();
                break;
            };
            let end = begin + 4 + length;
            let Some(body) = self.begun.get(begin + 4..end) else { break };
            frames.push(Frame { begin: begin.saturating_sub(earlier), body: body.to_vec() });
            begin = end;
        }
        self.begun.drain(..begin);
        frames
    }
}

/// What is left to read of a frame.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn request(&mut self, code: i32) -> Option<Request> {
        let op = match code {
            1 | 15 | 19 | 21 => Op::Create,
            2 => Op::Delete,
            3 => Op::Exists,
            4 => Op::GetData,
            5 => Op::SetData,
            8 | 12 => Op::GetChildren,
            9 => Op::Sync,
            11 => Op::Ping,
            13 => Op::Check,
            14 => Op::Multi,
            100 => Op::Auth,
            101 | 105 => Op::SetWatches,
            103 => Op::GetEphemerals,
            -11 => Op::CloseSession,
            other => Op::Other(other),
        };
        Some(match op {
            Op::Create => {
                let path = self.text()?;
                self.bytes()?;
                for _ in 0..self.int()? {
                    self.int()?;
                    self.text()?;
                    self.text()?;
                }
                let flags_and_ttl = if code == 21 { 12 } else { 4 };
                self.take(flags_and_ttl)?;
                Request::about(op, path, false)
            }
            Op::Delete | Op::Check => {
                let path = self.text()?;
                self.int()?;
                Request::about(op, path, false)
            }
            Op::SetData => {
                let path = self.text()?;
                self.bytes()?;
                self.int()?;
                Request::about(op, path, false)
            }
            Op::Exists | Op::GetData | Op::GetChildren => Request::about(op, self.text()?, self.take(1)? != [0]),
            Op::Sync | Op::GetEphemerals => Request::about(op, self.text()?, false),
            Op::Multi => Request { parts: self.parts()?, ..Request::about(op, "", false) },
            Op::SetWatches => Request::about(op, "", true),
            _ => Request::about(op, "", false),
        })
    }

    /// Each operation has a header of its own, and so has the end.
    fn parts(&mut self) -> Option<Vec<Request>> {
        let mut parts = Vec::new();
        loop {
            let (code, is_end, _error) = (self.int()?, self.take(1)? != [0], self.int()?);
            if is_end {
                return Some(parts);
            }
            parts.push(self.request(code)?);
        }
    }

    fn text(&mut self) -> Option<&'a str> {
        std::str::from_utf8(self.bytes()?).ok()
    }

    /// A length of -1 is that of nothing.
    fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.int()?.max(0);
        self.take(length as usize)
    }

    fn int(&mut self) -> Option<i32> {
        self.take(4)?.try_into().ok().map(i32::from_be_bytes)
    }

    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(body: &[u8]) -> Vec<u8> {
        [&(body.len() as i32).to_be_bytes(), body].concat()
    }

    #[test]
    fn frames_are_found_however_they_are_cut_into_chunks() {
        let bytes = [frame(b"first"), frame(b""), frame(b"third")].concat();
        for length in 1..=bytes.len() {
            let mut frames = Frames::default();
            let mut position = 0;
            let mut found = Vec::new();
            for chunk in bytes.chunks(length) {
                for frame in frames.complete(chunk) {
                    found.push(((position + frame.begin).max(position), frame.body));
                }
                position += chunk.len();
            }
            assert_eq!(found.iter().map(|(_, body)| &body[..]).collect::<Vec<_>>(), [&b"first"[..], b"", b"third"]);
            if length == bytes.len() {
                assert_eq!(found.iter().map(|(begin, _)| *begin).collect::<Vec<_>>(), [0, 9, 13]);
            }
        }
    }

    #[test]
    fn another_protocol_has_no_frames() {
        let mut frames = Frames::default();
        assert_eq!(frames.complete(b"ruok"), []);
        assert_eq!(frames.complete(&frame(b"x")), []);
    }

    #[test]
    fn what_cannot_be_read_is_known_by_its_number_at_least() {
        let request = |code: i32, rest: &[u8]| [&7_i32.to_be_bytes()[..], &code.to_be_bytes(), rest].concat();
        let (xid, read) = Request::read(&request(77, b"")).unwrap();
        assert_eq!((xid, read.op), (7, Op::Other(77)));
        for cut in [&b""[..], b"\0", b"\0\0\0\x05/a", b"\x7f\xff\xff\xff/a"] {
            assert_eq!(Request::read(&request(4, cut)).unwrap().1.op, Op::Other(4));
            assert_eq!(Request::read(&request(14, cut)).unwrap().1.op, Op::Other(14));
        }
        assert_eq!(Request::read(b"short"), None);
    }
}
