//! Lock paths and the names of the nodes below them.
//!
//! A contender is a child whose name ends in a marker and the sequence number that the server appended.
//! Each library has markers of its own; the ones that can share a queue with us are all read here, so that
//! a mixed queue has one order. Everything in this file is pure.

use std::fmt;

use crate::error::{PathError, PathFault};
use crate::options::Naming;

/// The longest lock path that is accepted, in bytes.
///
/// The server has no limit of its own but closes the connection on a request of about a megabyte; the client
/// library loses its session at a reconnect that has to restore 128 KiB of watched paths.
pub const MAX_PATH_LEN: usize = 8 * 1024;

/// The absolute path of a lock's node, as the client that it is used with sees it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LockPath(String);

impl LockPath {
    /// Accepts what every ZooKeeper server accepts as the path of a node that can have children.
    pub fn new(path: &str) -> Result<Self, PathError> {
        match Self::fault(path) {
            None => Ok(Self(path.to_owned())),
            Some(fault) => Err(PathError::new(path, fault)),
        }
    }

    fn fault(path: &str) -> Option<PathFault> {
        let Some(below_root) = path.strip_prefix('/') else {
            return Some(if path.is_empty() { PathFault::Empty } else { PathFault::NotAbsolute });
        };
        if below_root.is_empty() {
            return Some(PathFault::Root);
        }
        if path.len() > MAX_PATH_LEN {
            return Some(PathFault::TooLong);
        }
        if below_root.ends_with('/') {
            return Some(PathFault::TrailingSlash);
        }
        if let Some(char) = path.chars().find(|c| is_refused_by_the_server(*c)) {
            return Some(PathFault::Character(char));
        }
        below_root.split('/').find_map(|component| match component {
            "" => Some(PathFault::EmptyComponent),
            "." | ".." => Some(PathFault::RelativeComponent),
            _ => None,
        })
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn child(&self, name: &str) -> String {
        format!("{}/{name}", self.0)
    }
}

impl fmt::Display for LockPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The server checks UTF-16 units, so everything outside the basic plane, being surrogates to it, is refused too.
fn is_refused_by_the_server(c: char) -> bool {
    matches!(c, '\0'..='\u{1f}' | '\u{7f}'..='\u{9f}' | '\u{e000}'..='\u{f8ff}' | '\u{fff0}'..)
}

/// What a contender asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Excludes everyone: a mutex, or the writer of a readers-writer lock.
    Exclusive,
    /// A reader, which other readers do not exclude.
    Shared,
}

/// The markers that stand before the sequence number, and what they ask for.
///
/// Curator and go-zookeeper write `lock-`, Curator's readers-writer lock the next two, kazoo the two after.
const MARKERS: [(&str, Kind); 5] = [
    ("lock-", Kind::Exclusive),
    ("__WRIT__", Kind::Exclusive),
    ("__READ__", Kind::Shared),
    ("__lock__", Kind::Exclusive),
    ("__rlock__", Kind::Shared),
];

/// The shortest number that a server appends: `%010d`, the sign included.
const MIN_SEQUENCE_LEN: usize = 10;

/// A child of the lock's node that stands in the queue.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Entry {
    pub name: String,
    pub kind: Kind,
    pub sequence: i64,
}

impl Entry {
    /// Reads a name of any dialect, or nothing if the child is not a contender at all.
    pub fn parse(name: &str) -> Option<Self> {
        let (kind, sequence) = MARKERS
            .iter()
            .find_map(|(marker, kind)| Some((*kind, after_last(name, marker)?)))
            .or_else(|| Some((Kind::Exclusive, zookeepers_own(name)?)))?;
        Some(Self { name: name.to_owned(), kind, sequence })
    }

    /// The place in the queue. Names break the tie of equal numbers, which only a counter at its end hands out.
    pub fn place(&self) -> (i64, &str) {
        (self.sequence, &self.name)
    }
}

fn after_last(name: &str, marker: &str) -> Option<i64> {
    let (_, number) = name.rsplit_once(marker)?;
    sequence(number)
}

/// The recipe that ships with ZooKeeper: `x-<session id>-<sequence>`, both of them signed.
fn zookeepers_own(name: &str) -> Option<i64> {
    let rest = name.strip_prefix("x-")?;
    let unsigned = rest.strip_prefix('-').unwrap_or(rest);
    let (session, number) = unsigned.split_once('-')?;
    is_digits(session).then_some(())?;
    sequence(number)
}

fn sequence(number: &str) -> Option<i64> {
    let digits = number.strip_prefix('-').unwrap_or(number);
    (number.len() >= MIN_SEQUENCE_LEN && is_digits(digits)).then(|| number.parse().ok())?
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

/// What makes the node of one attempt recognisable, also when the answer to its create was lost.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tag {
    id: String,
    naming: Naming,
}

/// What the data of a node begins with whose name does not tell whose it is.
const DATA_MARK: &str = "zklock/1 ";

impl Tag {
    /// A tag that nobody else has.
    pub fn unique(naming: Naming) -> Self {
        Self { id: uuid::Uuid::new_v4().to_string(), naming }
    }

    /// The name that is sent to the server, which appends the sequence number.
    pub fn prefix(&self) -> String {
        match self.naming {
            Naming::Tagged => format!("_c_{}-{}", self.id, MARKERS[0].0),
            Naming::Compact => MARKERS[0].0.to_owned(),
        }
    }

    /// What the node holds.
    pub fn data(&self, label: &str) -> Vec<u8> {
        match self.naming {
            Naming::Tagged => label.as_bytes().to_vec(),
            Naming::Compact => format!("{DATA_MARK}{} {label}", self.id).into_bytes(),
        }
    }

    pub fn naming(&self) -> Naming {
        self.naming
    }

    /// Whether the attempt with this tag created the node with this name.
    pub fn is_in_name(&self, name: &str) -> bool {
        name.strip_prefix("_c_").is_some_and(|rest| rest.starts_with(&self.id))
    }

    /// Whether the attempt with this tag created the node with this data.
    pub fn is_in_data(&self, data: &[u8]) -> bool {
        data.strip_prefix(DATA_MARK.as_bytes()).is_some_and(|rest| rest.starts_with(self.id.as_bytes()))
    }

    /// The name that the node just before this one has, if it is named by the same rule and not gone.
    pub fn predecessor(&self, name: &str) -> Option<String> {
        let before = Entry::parse(name)?.sequence.checked_sub(1).filter(|sequence| *sequence >= 0)?;
        match self.naming {
            Naming::Tagged => None,
            Naming::Compact => Some(format!("{}{before:010}", MARKERS[0].0)),
        }
    }

    #[cfg(test)]
    pub fn named(name: &str, naming: Naming) -> Self {
        Self { id: name.to_owned(), naming }
    }
}

/// The label in a node's data.
pub fn label(data: &[u8]) -> &[u8] {
    const ID_LEN: usize = 36;
    let after_mark = data.strip_prefix(DATA_MARK.as_bytes());
    after_mark.and_then(|rest| rest.get(ID_LEN..)?.strip_prefix(b" ")).unwrap_or(data)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_dialect_is_read() {
        let uuid = "0f7a3c9e-8a52-4c0e-9d3b-1d2f3a4b5c6d";
        let hex = "0f7a3c9e8a524c0e9d3b1d2f3a4b5c6d";
        for (name, kind, sequence) in [
            (format!("_c_{uuid}-lock-0000000007"), Kind::Exclusive, 7),
            ("lock-0000000000".into(), Kind::Exclusive, 0),
            (format!("_c_{uuid}-__READ__0000000012"), Kind::Shared, 12),
            (format!("_c_{uuid}-__WRIT__0000000013"), Kind::Exclusive, 13),
            (format!("_c_{hex}-lock-2147483647"), Kind::Exclusive, 2147483647),
            (format!("{hex}__lock__0000000003"), Kind::Exclusive, 3),
            (format!("{hex}__rlock__0000000004"), Kind::Shared, 4),
            ("x-72057594037927936-0000000009".into(), Kind::Exclusive, 9),
            ("x--72057594037927936-0000000009".into(), Kind::Exclusive, 9),
            ("x-5--000000002".into(), Kind::Exclusive, -2),
            (format!("_c_{uuid}-lock--000000001"), Kind::Exclusive, -1),
            (format!("_c_{uuid}-lock--2147483648"), Kind::Exclusive, -2147483648),
            ("lock-0000000004294967296".into(), Kind::Exclusive, 4294967296),
        ] {
            let entry = Entry::parse(&name).unwrap_or_else(|| panic!("{name} is not read"));
            assert_eq!((entry.kind, entry.sequence), (kind, sequence), "{name}");
        }
    }

    #[test]
    fn what_is_no_contender_is_left_out() {
        for name in [
            "",
            "config",
            "lock-",
            "lock-1",
            "lock-00000000x7",
            "lock-+000000001",
            "lock-0000000001-old",
            "lock-99999999999999999999",
            "lease-0000000001",
            "x-0000000001",
            "x-abc-0000000001",
            "0000000001",
            "__lock__",
            "Schloß-0000000001",
        ] {
            assert_eq!(Entry::parse(name), None, "{name}");
        }
    }

    #[test]
    fn bad_paths_are_refused_with_their_reason() {
        for (path, fault) in [
            ("", PathFault::Empty),
            ("mylock", PathFault::NotAbsolute),
            ("./mylock", PathFault::NotAbsolute),
            ("/", PathFault::Root),
            ("/mylock/", PathFault::TrailingSlash),
            ("//", PathFault::TrailingSlash),
            ("/a//b", PathFault::EmptyComponent),
            ("//a", PathFault::EmptyComponent),
            ("/a/./b", PathFault::RelativeComponent),
            ("/a/..", PathFault::RelativeComponent),
            ("/a\0b", PathFault::Character('\0')),
            ("/tab\tstop", PathFault::Character('\t')),
            ("/\u{7f}", PathFault::Character('\u{7f}')),
            ("/\u{e000}", PathFault::Character('\u{e000}')),
            ("/\u{fffd}", PathFault::Character('\u{fffd}')),
            ("/emoji-🔒", PathFault::Character('🔒')),
        ] {
            let error = LockPath::new(path).unwrap_err();
            assert_eq!(error.fault(), &fault, "{path:?}");
            assert_eq!(error.path(), path);
        }
        let long = format!("/{}", "a".repeat(MAX_PATH_LEN));
        assert_eq!(LockPath::new(&long).unwrap_err().fault(), &PathFault::TooLong);
    }

    #[test]
    fn good_paths_are_kept_as_they_are() {
        for path in ["/mylock", "/a/b/c", "/a.b/..c/d..", "/Schlüssel/鍵", "/with space"] {
            let lock = LockPath::new(path).unwrap();
            assert_eq!(lock.as_str(), path);
            assert_eq!(lock.child("x"), format!("{path}/x"));
        }
    }

    #[test]
    fn a_tag_is_found_in_its_own_nodes_only() {
        for naming in [Naming::Tagged, Naming::Compact] {
            let (mine, other) = (Tag::unique(naming), Tag::unique(naming));
            let (name, data) = (format!("{}0000000001", mine.prefix()), mine.data("label"));
            assert_eq!(Entry::parse(&name).unwrap().sequence, 1);
            assert!(mine.is_in_name(&name) || mine.is_in_data(&data));
            assert!(!other.is_in_name(&name) && !other.is_in_data(&data));
            assert_eq!(label(&data), b"label");
        }
        for data in ["", "zklock/1 ", "zklock/1 mutex", "host-7"] {
            assert_eq!(label(data.as_bytes()), data.as_bytes());
        }
    }

    #[test]
    fn a_compact_name_tells_the_one_before_it() {
        let (tagged, compact) = (Tag::unique(Naming::Tagged), Tag::unique(Naming::Compact));
        assert_eq!(compact.predecessor("lock-0000000010").as_deref(), Some("lock-0000000009"));
        assert_eq!(compact.predecessor("lock-0000000000"), None);
        assert_eq!(tagged.predecessor(&format!("{}0000000010", tagged.prefix())), None);
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_a_panic(name in "\\PC*") {
            let _ = Entry::parse(&name);
            let _ = LockPath::new(&name);
        }

        #[test]
        fn whatever_the_server_appends_is_read_back(
            sequence in any::<i32>(),
            marker in 0..MARKERS.len(),
            prefix in "[-_a-zA-Z0-9]{0,40}",
        ) {
            let (marker, kind) = MARKERS[marker];
            let name = format!("{prefix}{marker}{sequence:010}");
            let entry = Entry::parse(&name).unwrap();
            prop_assert_eq!(entry.sequence, i64::from(sequence));
            prop_assert_eq!(entry.kind, kind);
        }

        #[test]
        fn numbers_of_more_than_ten_digits_are_read(sequence in 0..i64::MAX, width in 10usize..19) {
            let entry = Entry::parse(&format!("lock-{sequence:0width$}")).unwrap();
            prop_assert_eq!(entry.sequence, sequence);
        }
    }
}
