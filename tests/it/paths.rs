//! Where a lock can be.

use zklock::zookeeper::{Client, Error};
use zklock::{Mutex, Options, PathFault};

use crate::{place, within};

#[tokio::test(flavor = "multi_thread")]
async fn a_path_that_cannot_be_is_refused_before_anything_is_sent() {
    let place = place("bad-paths").await;
    let client = place.connect().await;
    for path in ["", "mylock", "./mylock", "/", "/mylock/", "//mylock", "/a//b", "/a/../b", "/a\0", "/🔒"] {
        let error = Mutex::new(&client, path).unwrap_err();
        assert_eq!(error.path(), path);
        assert!(error.to_string().contains(&format!("{path:?}")), "{error}");
    }
    let error = Mutex::with_options(&client, "/mylock", Options::default().label("x".repeat(1_000_001))).unwrap_err();
    assert_eq!(error.fault(), &PathFault::LabelTooLong(1_000_001));
    let error = Mutex::with_options(&client, "/mylock", Options::default().acl([])).unwrap_err();
    assert_eq!(error.fault(), &PathFault::EmptyAcl);
    assert_eq!(client.list_children("/").await.unwrap(), [""; 0]);
}

/// What our check lets through the server takes, and what it refuses the server would have refused.
#[tokio::test(flavor = "multi_thread")]
async fn the_check_of_paths_agrees_with_the_server() {
    let place = place("agree").await;
    let client = place.connect().await;
    let suspects = ['\u{1}', '\u{1f}', ' ', '~', '\u{7f}', '\u{9f}', '\u{a0}', 'ß', '鍵', '\u{d7ff}', '\u{e000}']
        .into_iter()
        .chain(['\u{f8ff}', '\u{f900}', '\u{ffef}', '\u{fff0}', '\u{fffd}', '\u{10000}', '🔒', '*', '%', '\\']);
    for suspect in suspects {
        let path = format!("/a{suspect}b");
        let mode = zklock::zookeeper::CreateMode::Persistent.with_acls(zklock::zookeeper::Acls::anyone_all());
        let is_taken = client.create(&path, b"", &mode).await.is_ok();
        assert_eq!(Mutex::new(&client, &path).is_ok(), is_taken, "{suspect:?}");
        if is_taken {
            within("the lock", Mutex::new(&client, &path).unwrap().lock()).await.unwrap().release().await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chroot_is_where_the_path_starts() {
    let place = place("chroot").await;
    let outer = place.connect().await;
    let mode = zklock::zookeeper::CreateMode::Persistent.with_acls(zklock::zookeeper::Acls::anyone_all());
    outer.create("/app", b"", &mode).await.unwrap();
    let connect = format!("{}{}/app", place.server().connect_string(), place.path());
    let inner = Client::connect(&connect).await.unwrap();
    let guard = Mutex::new(&inner, "/mylock").unwrap().lock().await.unwrap();
    assert!(guard.node().starts_with("/mylock/"), "{}", guard.node());
    // The same lock, seen from further out.
    let same = Mutex::new(&outer, "/app/mylock").unwrap();
    assert!(same.try_lock().await.is_err());
    assert_eq!(same.queue().await.unwrap()[0].token, guard.fencing_token());
    guard.release().await.unwrap();
    same.try_lock().await.unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chroot_that_does_not_exist_yet_is_made() {
    let place = place("new-chroot").await;
    let outer = place.connect().await;
    let connect = format!("{}{}/not/yet", place.server().connect_string(), place.path());
    let inner = Client::connect(&connect).await.unwrap();
    assert_eq!(inner.get_data("/").await.unwrap_err(), Error::NoNode);
    within("the lock", Mutex::new(&inner, "/mylock").unwrap().lock()).await.unwrap().release().await.unwrap();
    assert!(outer.check_stat("/not/yet/mylock").await.unwrap().is_some());
}
