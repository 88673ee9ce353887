//! The lock's own node: made when missing, left alone when there.

use zklock::zookeeper::{Acls, CreateMode};
use zklock::{LockError, Mutex, Options, Parents, ReleaseError};

use crate::{assert_free, place, until_queued, within};

#[tokio::test(flavor = "multi_thread")]
async fn a_node_with_the_users_data_is_used_and_left_as_it_is() {
    let place = place("users-data").await;
    let client = place.connect().await;
    let mode = CreateMode::Persistent.with_acls(Acls::anyone_all());
    client.create("/mylock", b"precious", &mode).await.unwrap();
    let (_, before) = client.get_data("/mylock").await.unwrap();
    for _ in 0..3 {
        Mutex::new(&client, "/mylock").unwrap().lock().await.unwrap().release().await.unwrap();
    }
    let (data, after) = client.get_data("/mylock").await.unwrap();
    assert_eq!(data, b"precious");
    assert_eq!((after.version, after.mzxid, after.czxid), (before.version, before.mzxid, before.czxid));
}

#[tokio::test(flavor = "multi_thread")]
async fn children_that_are_no_contenders_do_not_count_and_are_left_alone() {
    let place = place("foreign").await;
    let client = place.connect().await;
    let mode = CreateMode::Persistent.with_acls(Acls::anyone_all());
    let foreign = ["config", "lock-", "a-lock-abc", "lease-0000000000", "0000000000", "leader_0000000000"];
    client.create("/mylock", b"", &mode).await.unwrap();
    for name in foreign {
        client.create(&format!("/mylock/{name}"), b"theirs", &mode).await.unwrap();
    }
    let mutex = Mutex::new(&client, "/mylock").unwrap();
    let guard = within("the lock", mutex.lock()).await.unwrap();
    assert_eq!(mutex.queue().await.unwrap().len(), 1);
    guard.release().await.unwrap();
    within("a try", mutex.try_lock()).await.unwrap().release().await.unwrap();
    until_queued(&client, "/mylock", foreign.len()).await;
    for name in foreign {
        assert_eq!(client.get_data(&format!("/mylock/{name}")).await.unwrap().0, b"theirs");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_parents_are_made_and_go_again_unless_they_were_to_stay() {
    let place = place("missing").await;
    let client = place.connect().await;
    let persistent = Options::default().parents(Parents::Persistent);
    for (path, options) in [("/these/go/again", Options::default()), ("/these/stay/here", persistent)] {
        let mutex = Mutex::with_options(&client, path, options).unwrap();
        mutex.lock().await.unwrap().release().await.unwrap();
    }
    crate::eventually("the server removed the empty containers", async || {
        client.check_stat("/these/go").await.unwrap().is_none()
    })
    .await;
    assert!(client.check_stat("/these/stay/here").await.unwrap().is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parent_that_must_exist_is_not_made() {
    let place = place("must-exist").await;
    let client = place.connect().await;
    let options = Options::default().parents(Parents::MustExist);
    let mutex = Mutex::with_options(&client, "/mylock", options).unwrap();
    let error = within("the error", mutex.lock()).await.unwrap_err();
    assert_eq!(error, LockError::NoParent { path: "/mylock".into() });
    assert_eq!(client.check_stat("/mylock").await.unwrap(), None);
    let mode = CreateMode::Persistent.with_acls(Acls::anyone_all());
    client.create("/mylock", b"", &mode).await.unwrap();
    mutex.lock().await.unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parent_deleted_between_two_acquisitions_is_made_again() {
    let place = place("between").await;
    let client = place.connect().await;
    let mutex = Mutex::new(&client, "/deep/down/mylock").unwrap();
    for _ in 0..5 {
        within("the lock", mutex.lock()).await.unwrap().release().await.unwrap();
        for path in ["/deep/down/mylock", "/deep/down", "/deep"] {
            // The server may have been quicker: to it they are empty containers.
            let _ = client.delete(path, None).await;
        }
        assert_eq!(client.check_stat("/deep").await.unwrap(), None);
    }
    within("a try", mutex.try_lock()).await.unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parent_deleted_while_some_wait_is_made_again_and_they_are_granted() {
    let place = place("while-waiting").await;
    let client = place.connect().await;
    let mutex = Mutex::new(&client, "/mylock").unwrap();
    let guard = mutex.lock().await.unwrap();
    let waiting: Vec<_> = (0..3)
        .map(|_| {
            let mutex = mutex.clone();
            tokio::spawn(async move { mutex.lock().await.unwrap().release().await.unwrap() })
        })
        .collect();
    until_queued(&client, "/mylock", 4).await;
    let mut names = client.list_children("/mylock").await.unwrap();
    names.sort_by_key(|name| std::cmp::Reverse(name[name.len() - 10..].to_owned()));
    for name in names {
        client.delete(&format!("/mylock/{name}"), None).await.unwrap();
    }
    // Somebody may have queued again already: then the node stays, which is as well.
    let _ = client.delete("/mylock", None).await;
    for waiter in waiting {
        within("a grant", waiter).await.unwrap();
    }
    let node = guard.node().to_owned();
    assert_eq!(guard.release().await, Err(ReleaseError::Lost { node }));
    assert_free(&client, "/mylock").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ephemeral_node_in_the_place_of_the_lock_gets_a_clear_error() {
    let place = place("ephemeral").await;
    let client = place.connect().await;
    let mode = CreateMode::Ephemeral.with_acls(Acls::anyone_all());
    client.create("/mylock", b"", &mode).await.unwrap();
    let error = within("the error", Mutex::new(&client, "/mylock").unwrap().lock()).await.unwrap_err();
    assert!(error.to_string().contains("/mylock") && error.to_string().contains("ephemeral"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parent_that_may_not_be_written_to_gets_a_clear_error() {
    let place = place("forbidden").await;
    let client = place.connect().await;
    let mode = CreateMode::Persistent.with_acls(Acls::anyone_read());
    client.create("/mylock", b"", &mode).await.unwrap();
    let error = within("the error", Mutex::new(&client, "/mylock").unwrap().lock()).await.unwrap_err();
    assert!(error.to_string().contains("/mylock") && error.to_string().contains("access control"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_access_control_list_goes_to_the_parents_and_to_the_entries() {
    let place = place("acl").await;
    let (client, stranger) = (place.connect().await, place.connect().await);
    client.auth("digest", b"us:secret").await.unwrap();
    let acl = Acls::creator_all().iter().cloned().collect::<Vec<_>>();
    let mutex = Mutex::with_options(&client, "/ours/mylock", Options::default().acl(acl)).unwrap();
    let guard = mutex.lock().await.unwrap();
    for path in ["/ours", "/ours/mylock", guard.node()] {
        let (acl, _) = client.get_acl(path).await.unwrap();
        assert_eq!(acl.len(), 1, "{path}");
        assert_eq!(acl[0].scheme(), "digest", "{path}");
    }
    let theirs = Mutex::new(&stranger, "/ours/mylock").unwrap();
    assert!(matches!(within("a lock", theirs.lock()).await, Err(LockError::Refused { .. })));
    assert!(matches!(theirs.queue().await, Err(LockError::Refused { .. })));
    guard.release().await.unwrap();
    assert_free(&client, "/ours/mylock").await;
}
