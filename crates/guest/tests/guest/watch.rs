//! File watching: what is reported for which change, in trees that change, and its bounds.

use crate::support::{Guest, path_bytes, with_guest};
use bytes::Bytes;
use k8e_wire::HostEnd;
use k8e_wire::proto::{self, ErrorCode, FileChange, WatchFiles, reply::Reply, request::Call};
use std::collections::VecDeque;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;

use FileChange::{Attributes, Created, MovedFrom, MovedTo, Overflow, Removed, Written};

/// A watch in progress.
struct Watcher {
    end: HostEnd,
    events: VecDeque<proto::FileEvent>,
}

type Seen = (FileChange, String);

impl Guest {
    async fn watch(&self, path: &str, recursive: bool) -> Result<Watcher, proto::Error> {
        self.watch_in(&self.root, path, recursive).await
    }

    async fn watch_in(
        &self,
        root: &Path,
        path: &str,
        recursive: bool,
    ) -> Result<Watcher, proto::Error> {
        let request = WatchFiles {
            root: path_bytes(root),
            path: Bytes::copy_from_slice(path.as_bytes()),
            recursive,
        };
        let mut end = self.call(Call::WatchFiles(request)).await;
        match end.replies.next().await.unwrap() {
            Reply::Watching(_) => Ok(Watcher {
                end,
                events: VecDeque::new(),
            }),
            Reply::Error(error) => Err(error),
            other => panic!("{other:?}"),
        }
    }

    async fn refused(&self, path: &str, recursive: bool) -> proto::Error {
        match self.watch(path, recursive).await {
            Ok(_) => panic!("{path} is watched"),
            Err(error) => error,
        }
    }
}

impl Watcher {
    async fn next(&mut self) -> Result<proto::FileEvent, proto::Error> {
        while self.events.is_empty() {
            match self.end.replies.next().await.unwrap() {
                Reply::FileEvents(events) => {
                    assert!((1..=256).contains(&events.events.len()));
                    self.events.extend(events.events);
                }
                Reply::Error(error) => return Err(error),
                other => panic!("{other:?}"),
            }
        }
        Ok(self.events.pop_front().unwrap())
    }

    /// Events up to one about this path, without it.
    async fn until(&mut self, path: &str) -> Vec<Seen> {
        let mut seen = Vec::new();
        loop {
            let event = self.next().await.unwrap();
            let at = String::from_utf8(event.path.to_vec()).unwrap();
            if at == path {
                return seen;
            }
            seen.push((event.change(), at));
        }
    }
}

fn seen(events: &[(FileChange, &str)]) -> Vec<Seen> {
    let seen = events.iter();
    seen.map(|(change, path)| (*change, (*path).to_owned()))
        .collect()
}

#[test]
fn every_change_in_a_directory_is_reported() {
    with_guest(async |guest| {
        let dir = guest.root.join("dir");
        fs::create_dir_all(dir.join("sub")).unwrap();
        fs::write(dir.join("old"), "x").unwrap();
        let mut watcher = guest.watch("dir", false).await.unwrap();
        fs::write(dir.join("new"), "x").unwrap();
        fs::set_permissions(dir.join("new"), fs::Permissions::from_mode(0o600)).unwrap();
        fs::remove_file(dir.join("new")).unwrap();
        fs::create_dir(dir.join("made")).unwrap();
        fs::remove_dir(dir.join("made")).unwrap();
        fs::write(dir.join("old"), "more").unwrap();
        // Not recursive: nothing of this is reported.
        fs::write(dir.join("sub/file"), "x").unwrap();
        fs::create_dir_all(dir.join("deep/er")).unwrap();
        fs::write(dir.join("deep/er/file"), "x").unwrap();
        fs::write(dir.join("end"), "").unwrap();
        let events = watcher.until("end").await;
        assert_eq!(
            events,
            seen(&[
                (Created, "new"),
                (Written, "new"),
                (Attributes, "new"),
                (Removed, "new"),
                (Created, "made"),
                (Removed, "made"),
                (Written, "old"),
                (Created, "deep"),
            ])
        );
        // A file call of the host is a change as any other: written beside, then renamed.
        guest.write(b"dir/called", b"x", false, 0).await.unwrap();
        loop {
            let event = watcher.next().await.unwrap();
            if event.change() == MovedTo && event.path == "called" {
                break;
            }
        }
    });
}

#[test]
fn the_halves_of_a_rename_belong_together() {
    with_guest(async |guest| {
        let dir = guest.root.join("dir");
        fs::create_dir_all(dir.join("sub")).unwrap();
        for name in ["a", "out"] {
            fs::write(dir.join(name), "x").unwrap();
        }
        fs::write(guest.root.join("in"), "x").unwrap();
        let mut watcher = guest.watch("dir", true).await.unwrap();
        fs::rename(dir.join("a"), dir.join("sub/b")).unwrap();
        fs::rename(dir.join("out"), guest.root.join("elsewhere")).unwrap();
        fs::rename(guest.root.join("in"), dir.join("in")).unwrap();
        let mut events = Vec::new();
        for _ in 0..4 {
            events.push(watcher.next().await.unwrap());
        }
        let about = |event: &proto::FileEvent| {
            let path = String::from_utf8(event.path.to_vec()).unwrap();
            (event.change(), path)
        };
        let changes: Vec<Seen> = events.iter().map(about).collect();
        let expected = [
            (MovedFrom, "a"),
            (MovedTo, "sub/b"),
            (MovedFrom, "out"),
            (MovedTo, "in"),
        ];
        assert_eq!(changes, seen(&expected));
        let ids: Vec<u32> = events.iter().map(|event| event.move_id).collect();
        assert!(ids[0] != 0 && ids[0] == ids[1], "{ids:?}");
        assert!(ids[2] != ids[3] && ids[2] != ids[0], "{ids:?}");
    });
}

#[test]
fn new_directories_are_watched_with_what_is_already_in_them() {
    with_guest(async |guest| {
        let root = &guest.root;
        fs::create_dir_all(root.join("there/already")).unwrap();
        let mut watcher = guest.watch("", true).await.unwrap();
        // The guest runs on this thread: all of this is there before it can watch any of it.
        fs::create_dir_all(root.join("a/b/c")).unwrap();
        fs::write(root.join("a/b/c/file"), "").unwrap();
        fs::write(root.join("there/already/file"), "").unwrap();
        fs::write(root.join("end"), "").unwrap();
        let mut events = watcher.until("end").await;
        fs::write(root.join("a/b/later"), "").unwrap();
        fs::write(root.join("end2"), "").unwrap();
        events.extend(watcher.until("end2").await);
        events.sort_by(|(_, a), (_, b)| a.cmp(b));
        // Each once.
        let expected = [
            (Created, "a"),
            (Created, "a/b"),
            (Created, "a/b/c"),
            (Created, "a/b/c/file"),
            (Created, "a/b/later"),
            (Created, "there/already/file"),
        ];
        assert_eq!(events, seen(&expected));
    });
}

#[test]
fn a_directory_that_is_moved_keeps_its_watches() {
    with_guest(async |guest| {
        let root = &guest.root;
        fs::create_dir_all(root.join("w/one/deep")).unwrap();
        fs::create_dir_all(root.join("other/deep")).unwrap();
        let mut watcher = guest.watch("w", true).await.unwrap();
        fs::rename(root.join("w/one"), root.join("w/two")).unwrap();
        fs::write(root.join("w/two/deep/file"), "").unwrap();
        fs::rename(root.join("other"), root.join("w/other")).unwrap();
        fs::write(root.join("w/end"), "").unwrap();
        let events = watcher.until("end").await;
        let expected = [
            (MovedFrom, "one"),
            (MovedTo, "two"),
            (Created, "two/deep/file"),
            (MovedTo, "other"),
        ];
        assert_eq!(events, seen(&expected));
        // What came from elsewhere is watched, what went elsewhere is not.
        fs::write(root.join("w/other/deep/file"), "").unwrap();
        watcher.until("other/deep/file").await;
        fs::rename(root.join("w/two"), root.join("gone")).unwrap();
        assert_eq!(watcher.next().await.unwrap().path, "two");
        // Its removal from the watch is not an event; one more round trip and it has been done.
        fs::write(root.join("w/first"), "").unwrap();
        watcher.until("first").await;
        fs::write(root.join("gone/deep/file2"), "").unwrap();
        // A directory is made and renamed before it can be watched.
        fs::create_dir(root.join("w/made")).unwrap();
        fs::rename(root.join("w/made"), root.join("w/renamed")).unwrap();
        fs::write(root.join("w/renamed/file"), "").unwrap();
        fs::write(root.join("w/last"), "").unwrap();
        let mut events = watcher.until("last").await;
        fs::write(root.join("w/renamed/late"), "").unwrap();
        events.extend(watcher.until("renamed/late").await);
        assert!(
            events.iter().all(|(_, path)| !path.contains("file2")),
            "{events:?}"
        );
        assert!(
            events.contains(&(Created, "renamed/file".to_owned())),
            "{events:?}"
        );
    });
}

#[test]
fn directories_that_are_exchanged_keep_their_own_watches() {
    with_guest(async |guest| {
        let root = &guest.root;
        fs::create_dir_all(root.join("a/of-a")).unwrap();
        fs::create_dir_all(root.join("b/of-b")).unwrap();
        let mut watcher = guest.watch("", true).await.unwrap();
        let flags = rustix::fs::RenameFlags::EXCHANGE;
        let cwd = rustix::fs::CWD;
        rustix::fs::renameat_with(cwd, root.join("a"), cwd, root.join("b"), flags).unwrap();
        fs::write(root.join("end"), "").unwrap();
        watcher.until("end").await;
        fs::write(root.join("end2"), "").unwrap();
        watcher.until("end2").await;
        fs::write(root.join("b/of-a/file"), "").unwrap();
        fs::write(root.join("a/of-b/file"), "").unwrap();
        assert_eq!(watcher.next().await.unwrap().path, "b/of-a/file");
        assert_eq!(watcher.next().await.unwrap().path, "a/of-b/file");
    });
}

#[test]
fn only_directories_below_the_root_are_watched_and_links_are_not_entered() {
    with_guest(async |guest| {
        let root = &guest.root;
        let outside = root.parent().unwrap().join("outside");
        fs::create_dir_all(outside.join("dir")).unwrap();
        fs::create_dir_all(root.join("dir/sub")).unwrap();
        fs::write(root.join("file"), "").unwrap();
        symlink(&outside, root.join("out")).unwrap();
        symlink(&outside, root.join("dir/link")).unwrap();
        symlink("dir", root.join("in")).unwrap();
        for (path, code) in [
            ("out", ErrorCode::Outside),
            ("out/dir", ErrorCode::Outside),
            ("../outside", ErrorCode::Outside),
            ("/etc", ErrorCode::Outside),
            ("file", ErrorCode::NotDirectory),
            ("missing", ErrorCode::NotFound),
        ] {
            let refused = guest.refused(path, true).await;
            assert_eq!(refused.code(), code, "{path}: {}", refused.message);
        }
        let mut watcher = guest.watch("in", true).await.unwrap();
        fs::write(outside.join("secret"), "").unwrap();
        fs::write(outside.join("dir/secret"), "").unwrap();
        // A directory that is replaced by a link before it can be watched.
        fs::create_dir(root.join("dir/swapped")).unwrap();
        fs::remove_dir(root.join("dir/swapped")).unwrap();
        symlink(&outside, root.join("dir/swapped")).unwrap();
        fs::write(root.join("dir/sub/end"), "").unwrap();
        let events = watcher.until("sub/end").await;
        let expected = [
            (Created, "swapped"),
            (Removed, "swapped"),
            (Created, "swapped"),
        ];
        assert_eq!(events, seen(&expected));
        fs::write(outside.join("secret2"), "").unwrap();
        fs::write(root.join("dir/sub/end2"), "").unwrap();
        assert_eq!(watcher.until("sub/end2").await, []);
    });
}

#[test]
fn a_watch_ends_with_its_directory_after_its_last_events() {
    with_guest(async |guest| {
        let dir = guest.root.join("dir");
        fs::create_dir(&dir).unwrap();
        let mut watcher = guest.watch("dir", false).await.unwrap();
        fs::write(dir.join("f"), "").unwrap();
        fs::remove_file(dir.join("f")).unwrap();
        fs::remove_dir(&dir).unwrap();
        assert_eq!(watcher.next().await.unwrap().change(), Created);
        assert_eq!(watcher.next().await.unwrap().change(), Removed);
        let ended = watcher.next().await.unwrap_err();
        assert_eq!(ended.code(), ErrorCode::NotFound, "{}", ended.message);
        assert!(ended.message.contains("removed or moved"), "{ended:?}");

        fs::create_dir(&dir).unwrap();
        let mut watcher = guest.watch("dir", true).await.unwrap();
        fs::rename(&dir, guest.root.join("away")).unwrap();
        let ended = watcher.next().await.unwrap_err();
        assert_eq!(ended.code(), ErrorCode::NotFound);
    });
}

#[test]
fn lost_events_are_reported_and_directories_among_them_are_found() {
    with_guest(async |guest| {
        let root = &guest.root;
        let mut watcher = guest.watch("", true).await.unwrap();
        // More than the queues of the kernel and of the guest hold; the guest cannot read meanwhile.
        for n in 0..20_000 {
            fs::write(root.join((n % 2).to_string()), "").unwrap();
            fs::remove_file(root.join((n % 2).to_string())).unwrap();
        }
        fs::create_dir_all(root.join("lost/deep")).unwrap();
        let mut overflows = 0;
        let mut count = 0;
        while overflows == 0 {
            let event = watcher.next().await.unwrap();
            count += 1;
            overflows += usize::from(event.change() == Overflow);
            assert!(event.change() != Overflow || event.path.is_empty());
        }
        assert!(count < 20_000, "{count} events");
        // The scan that follows an overflow is not seen from here; its result is.
        for n in 0.. {
            fs::write(root.join("lost/deep").join(n.to_string()), "").unwrap();
            fs::write(root.join(format!("mark-{n}")), "").unwrap();
            let before = watcher.until(&format!("mark-{n}")).await;
            if before.contains(&(Created, format!("lost/deep/{n}"))) {
                break;
            }
            assert!(n < 100, "a directory that was missed is never watched");
        }
    });
}

#[test]
fn a_host_that_does_not_read_gets_an_overflow_and_blocks_nobody() {
    with_guest(async |guest| {
        let root = &guest.root;
        let mut watcher = guest.watch("", false).await.unwrap();
        // Long names fill the socket and the queue; each other call lets the guest read in between.
        for n in 0..5_000 {
            fs::write(root.join(format!("{n:0>200}")), "").unwrap();
            if n % 100 == 0 {
                guest.read(b"missing", 0, 0).await.unwrap_err();
            }
        }
        guest.write(b"last", b"x", false, 0).await.unwrap();
        let mut count = 0;
        while watcher.next().await.unwrap().change() != Overflow {
            count += 1;
        }
        assert!((100..5_000).contains(&count), "{count} events before");
        fs::write(root.join("after"), "").unwrap();
        watcher.until("after").await;
    });
}

#[test]
fn watches_and_their_directories_are_bounded_and_end_with_their_calls() {
    with_guest(async |guest| {
        let root = &guest.root;
        fs::create_dir(root.join("small")).unwrap();
        let mut watchers = Vec::new();
        for _ in 0..32 {
            watchers.push(guest.watch("small", true).await.unwrap());
        }
        let refused = guest.refused("small", false).await;
        assert_eq!(refused.code(), ErrorCode::Exhausted);
        assert!(refused.message.contains("32"), "{}", refused.message);
        drop(watchers);
        // The guest notices a closed connection when it is scheduled.
        let watcher = loop {
            match guest.watch("small", true).await {
                Ok(watcher) => break watcher,
                Err(error) => assert_eq!(error.code(), ErrorCode::Exhausted),
            }
            tokio::task::yield_now().await;
        };
        drop(watcher);

        // In memory: the disk of a busy machine takes long to remove thousands of directories.
        let memory = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut watcher = guest.watch_in(memory.path(), "", true).await.unwrap();
        for n in 0..8192 {
            fs::create_dir(memory.path().join(n.to_string())).unwrap();
        }
        let ended = loop {
            match watcher.next().await {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert_eq!(ended.code(), ErrorCode::Exhausted, "{}", ended.message);
        let refused = guest.watch_in(memory.path(), "", true).await.err().unwrap();
        assert_eq!(refused.code(), ErrorCode::Exhausted);
        assert!(refused.message.contains("8192"), "{}", refused.message);
        assert!(guest.watch_in(memory.path(), "", false).await.is_ok());

        let mut deep = root.join("deep");
        for _ in 0..70 {
            deep.push("d");
        }
        fs::create_dir_all(&deep).unwrap();
        let refused = guest.refused("deep", true).await;
        assert_eq!(refused.code(), ErrorCode::Exhausted);
        assert!(refused.message.contains("deeper"), "{}", refused.message);
    });
}
