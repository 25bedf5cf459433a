//! File calls, also against concurrent changes by hostile processes.

use crate::support::{Guest, path_bytes, with_guest};
use bytes::Bytes;
use k8e_wire::proto::{
    self, ErrorCode, FileInfo, FileType, ListFiles, MakeDir, Move, Remove, Stat, WriteFile,
    input::Input, reply::Reply, request::Call,
};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

impl Guest {
    async fn stat(&self, path: &str) -> Result<FileInfo, proto::Error> {
        match self
            .one(Call::Stat(Stat {
                root: self.root_bytes(),
                path: bytes(path),
                follow: false,
            }))
            .await?
        {
            Reply::File(info) => Ok(info),
            other => panic!("{other:?}"),
        }
    }

    async fn make_dir(&self, path: &str, parents: bool, mode: u32) -> Result<Reply, proto::Error> {
        self.one(Call::MakeDir(MakeDir {
            root: self.root_bytes(),
            path: bytes(path),
            parents,
            mode,
            user: String::new(),
        }))
        .await
    }

    async fn rename(&self, from: &str, to: &str) -> Result<Reply, proto::Error> {
        self.one(Call::Move(Move {
            root: self.root_bytes(),
            from: bytes(from),
            to: bytes(to),
            parents: false,
            user: String::new(),
        }))
        .await
    }

    async fn remove(&self, path: &str, recursive: bool) -> Result<Reply, proto::Error> {
        self.one(Call::Remove(Remove {
            root: self.root_bytes(),
            path: bytes(path),
            recursive,
        }))
        .await
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.root).unwrap().flatten();
        let mut names: Vec<_> = entries
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }
}

fn bytes(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

fn code<T: std::fmt::Debug>(result: Result<T, proto::Error>) -> ErrorCode {
    result.unwrap_err().code()
}

#[test]
fn write_and_read() {
    with_guest(async |guest| {
        assert_eq!(guest.write(b"a/b/c.txt", b"hello", false, 0).await, Ok(5));
        let (info, data) = guest.read(b"a/b/c.txt", 0, 0).await.unwrap();
        assert_eq!(
            (data.as_slice(), info.size, info.mode),
            (&b"hello"[..], 5, 0o644)
        );
        assert_eq!(
            (info.path, info.r#type),
            (
                path_bytes(&guest.root.join("a/b/c.txt")),
                FileType::File.into()
            )
        );
        assert_eq!(guest.read(b"a/b/c.txt", 1, 3).await.unwrap().1, b"ell");
        assert_eq!(guest.read(b"a/b/c.txt", 4, 100).await.unwrap().1, b"o");
        assert_eq!(guest.read(b"a/b/c.txt", 99, 0).await.unwrap().1, b"");
        assert_eq!(guest.read(b"a/b/c.txt", u64::MAX, 1).await.unwrap().1, b"");
        assert_eq!(guest.write(b"empty", b"", false, 0o600).await, Ok(0));
        assert_eq!(guest.stat("empty").await.unwrap().mode, 0o600);
        assert_eq!(guest.write(b"a/b/c.txt", b" world", true, 0).await, Ok(6));
        assert_eq!(guest.write(b"new.log", b"1", true, 0o640).await, Ok(1));
        assert_eq!(
            guest.read(b"a/b/c.txt", 0, 0).await.unwrap().1,
            b"hello world"
        );
        assert_eq!(guest.stat("new.log").await.unwrap().mode, 0o640);
    });
}

#[test]
fn a_replaced_file_keeps_its_mode_and_owner() {
    with_guest(async |guest| {
        let path = guest.root.join("f");
        std::fs::write(&path, "old").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o751)).unwrap();
        std::os::unix::fs::chown(&path, Some(1234), Some(1235)).unwrap();
        guest.write(b"f", b"new", false, 0).await.unwrap();
        let metadata = std::fs::metadata(&path).unwrap();
        assert_eq!(
            (metadata.mode() & 0o7777, metadata.uid(), metadata.gid()),
            (0o751, 1234, 1235)
        );
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(guest.names(), ["f"]);
    });
}

#[test]
fn what_is_no_file_is_refused_and_never_blocks() {
    with_guest(async |guest| {
        std::fs::create_dir(guest.root.join("dir")).unwrap();
        std::fs::write(guest.root.join("file"), "").unwrap();
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(
            rustix::fs::CWD,
            guest.root.join("fifo"),
            rustix::fs::FileType::Fifo,
            mode,
            0,
        )
        .unwrap();
        assert_eq!(code(guest.read(b"dir", 0, 0).await), ErrorCode::IsDirectory);
        assert_eq!(
            code(guest.write(b"dir", b"x", false, 0).await),
            ErrorCode::IsDirectory
        );
        assert_eq!(code(guest.read(b"", 0, 0).await), ErrorCode::IsDirectory);
        assert_eq!(
            code(guest.write(b"", b"x", false, 0).await),
            ErrorCode::IsDirectory
        );
        assert_eq!(code(guest.read(b"fifo", 0, 0).await), ErrorCode::Invalid);
        assert_eq!(
            code(guest.write(b"fifo", b"x", false, 0).await),
            ErrorCode::Invalid
        );
        assert_eq!(
            code(guest.write(b"fifo", b"x", true, 0).await),
            ErrorCode::Invalid
        );
        assert_eq!(
            code(guest.read(b"missing", 0, 0).await),
            ErrorCode::NotFound
        );
        assert_eq!(
            code(guest.read(b"missing/x", 0, 0).await),
            ErrorCode::NotFound
        );
        assert_eq!(
            code(guest.read(b"file/x", 0, 0).await),
            ErrorCode::NotDirectory
        );
        assert_eq!(code(guest.read(b"a\0b", 0, 0).await), ErrorCode::Invalid);
        assert_eq!(
            code(guest.read(&[b'a'; 300], 0, 0).await),
            ErrorCode::Invalid
        );
        assert_eq!(
            code(guest.read(&[b'a'; 5000], 0, 0).await),
            ErrorCode::Invalid
        );
        assert_eq!(guest.names(), ["dir", "fifo", "file"]);
    });
}

#[test]
fn names_are_bytes() {
    with_guest(async |guest| {
        for name in [
            &b"\xff\xfe"[..],
            b"new\nline",
            b" ",
            b"-rf",
            b"...",
            b"\x1b[2J",
        ] {
            guest.write(name, name, false, 0).await.unwrap();
            assert_eq!(guest.read(name, 0, 0).await.unwrap().1, name);
        }
        let (files, _) = guest.list(ListFiles::default()).await.unwrap();
        assert_eq!(files.len(), 6);
        let want = path_bytes(&guest.root.join(std::ffi::OsStr::from_bytes(b"\xff\xfe")));
        assert!(files.iter().any(|file| file.path == want));
    });
}

#[test]
fn links_that_stay_beneath_the_root_are_followed() {
    with_guest(async |guest| {
        let root = &guest.root;
        std::fs::create_dir_all(root.join("a/b")).unwrap();
        std::fs::write(root.join("a/file"), "inside").unwrap();
        symlink("../file", root.join("a/b/up")).unwrap();
        symlink(root.join("a/file"), root.join("absolute")).unwrap();
        symlink("a/b", root.join("dir")).unwrap();
        symlink("nothing-yet", root.join("dangling")).unwrap();
        symlink("loop", root.join("loop")).unwrap();
        symlink("a/b/..", root.join("dots")).unwrap();
        for path in ["a/b/up", "absolute", "dir/up", "dots/file"] {
            assert_eq!(
                guest.read(path.as_bytes(), 0, 0).await.unwrap().1,
                b"inside",
                "{path}"
            );
        }
        guest
            .write(b"dangling", b"through", false, 0)
            .await
            .unwrap();
        assert_eq!(std::fs::read(root.join("nothing-yet")).unwrap(), b"through");
        guest
            .write(b"absolute", b"replaced", false, 0)
            .await
            .unwrap();
        assert_eq!(std::fs::read(root.join("a/file")).unwrap(), b"replaced");
        assert!(root.join("absolute").is_symlink());
        assert_eq!(code(guest.read(b"loop", 0, 0).await), ErrorCode::Invalid);
        assert_eq!(
            guest
                .list(ListFiles {
                    path: bytes("dots"),
                    ..ListFiles::default()
                })
                .await
                .unwrap()
                .0
                .len(),
            2
        );
        let stat = guest.stat("dir").await.unwrap();
        assert_eq!(
            (stat.r#type(), stat.symlink_target.as_ref()),
            (FileType::Symlink, &b"a/b"[..])
        );
    });
}

#[test]
fn links_that_lead_out_are_refused() {
    with_guest(async |guest| {
        let root = &guest.root;
        let outside = root.parent().unwrap().join("outside");
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("secret"), "secret").unwrap();
        std::fs::create_dir(root.join("deep")).unwrap();
        symlink(&outside, root.join("absolute")).unwrap();
        symlink("../outside", root.join("relative")).unwrap();
        symlink("../../outside", root.join("deep/relative")).unwrap();
        symlink(outside.join("secret"), root.join("file")).unwrap();
        symlink("absolute", root.join("chain")).unwrap();
        symlink(format!("{}/../outside", root.display()), root.join("sly")).unwrap();
        for path in [
            "absolute/secret",
            "relative/secret",
            "deep/relative/secret",
            "file",
            "chain/secret",
            "sly/secret",
        ] {
            assert_eq!(
                code(guest.read(path.as_bytes(), 0, 0).await),
                ErrorCode::Outside,
                "{path}"
            );
            assert_eq!(
                code(guest.write(path.as_bytes(), b"x", false, 0).await),
                ErrorCode::Outside,
                "{path}"
            );
            assert_eq!(
                code(guest.write(path.as_bytes(), b"x", true, 0).await),
                ErrorCode::Outside,
                "{path}"
            );
        }
        for path in ["absolute/x", "relative/x", "sly/x"] {
            assert_eq!(
                code(guest.make_dir(path, true, 0).await),
                ErrorCode::Outside
            );
            assert_eq!(code(guest.remove(path, true).await), ErrorCode::Outside);
            assert_eq!(code(guest.stat(path).await), ErrorCode::Outside);
            assert_eq!(code(guest.rename("deep", path).await), ErrorCode::Outside);
        }
        for path in [
            "../outside/secret",
            "deep/../../outside/secret",
            "..",
            "/etc/passwd",
        ] {
            assert_eq!(
                code(guest.read(path.as_bytes(), 0, 0).await),
                ErrorCode::Outside,
                "{path}"
            );
        }
        let list = ListFiles {
            path: bytes("absolute"),
            recursive: true,
            ..ListFiles::default()
        };
        assert_eq!(code(guest.list(list).await), ErrorCode::Outside);
        let (all, _) = guest
            .list(ListFiles {
                recursive: true,
                ..ListFiles::default()
            })
            .await
            .unwrap();
        assert_eq!(all.len(), 7);
        guest.remove("absolute", true).await.unwrap();
        assert_eq!(std::fs::read(outside.join("secret")).unwrap(), b"secret");
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 1);
    });
}

#[test]
fn swapping_directories_and_links_never_leads_out() {
    with_guest(async |guest| {
        let root = guest.root.clone();
        let outside = root.parent().unwrap().join("outside");
        std::fs::create_dir_all(&outside).unwrap();
        std::fs::write(outside.join("f"), "secret").unwrap();
        std::fs::create_dir(root.join("x")).unwrap();
        std::fs::write(root.join("x/f"), "inside").unwrap();
        symlink(&outside, root.join("link")).unwrap();
        std::fs::write(root.join("g"), "inside").unwrap();
        symlink(outside.join("f"), root.join("g-link")).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let swapper = std::thread::spawn({
            let stop = Arc::clone(&stop);
            move || {
                let path = |name: &str| root.join(name);
                while !stop.load(Ordering::Relaxed) {
                    for (x, link) in [("x", "link"), ("g", "g-link")] {
                        let flags = rustix::fs::RenameFlags::EXCHANGE;
                        let cwd = rustix::fs::CWD;
                        // The host's writes replace `g`; whatever is there is swapped.
                        let _ = rustix::fs::renameat_with(cwd, path(x), cwd, path(link), flags);
                    }
                }
            }
        });
        let begin = Instant::now();
        let (mut inside, mut refused) = (0, 0);
        while begin.elapsed() < Duration::from_secs(1) {
            for path in [&b"x/f"[..], b"g"] {
                match guest.read(path, 0, 0).await {
                    Ok((_, data)) => {
                        assert_ne!(data, b"secret");
                        inside += 1;
                    }
                    Err(_) => refused += 1,
                }
            }
            let _ = guest.write(b"x/new", b"n", false, 0).await;
            let _ = guest.write(b"x/log", b"n", true, 0).await;
            let _ = guest.remove("x/new", true).await;
            let _ = guest.make_dir("x/d/e", true, 0).await;
            let (files, _) = guest
                .list(ListFiles {
                    recursive: true,
                    ..ListFiles::default()
                })
                .await
                .unwrap();
            assert!(
                files
                    .iter()
                    .all(|file| file.size != 6 || !file.path.ends_with(b"outside/f"))
            );
        }
        stop.store(true, Ordering::Relaxed);
        swapper.join().unwrap();
        assert!(
            inside > 0 && refused > 0,
            "{inside} {refused}: the race did not happen"
        );
        let left: Vec<_> = std::fs::read_dir(&outside)
            .unwrap()
            .flatten()
            .map(|entry| entry.file_name())
            .collect();
        assert_eq!(left, ["f"]);
        assert_eq!(std::fs::read(outside.join("f")).unwrap(), b"secret");
    });
}

#[test]
fn a_large_file_comes_back_bit_for_bit() {
    with_guest(async |guest| {
        let data: Vec<u8> = (0..16 * 1024 * 1024u32)
            .flat_map(|n| n.wrapping_mul(2_654_435_761).to_ne_bytes())
            .collect();
        assert_eq!(
            guest.write(b"big", &data, false, 0).await,
            Ok(data.len() as u64)
        );
        let (info, got) = guest.read(b"big", 0, 0).await.unwrap();
        assert_eq!(info.size, data.len() as u64);
        assert!(got == data);
    });
}

#[test]
fn a_cancelled_write_leaves_nothing() {
    with_guest(async |guest| {
        guest.write(b"kept", b"old", false, 0).await.unwrap();
        for path in ["kept", "never"] {
            let request = WriteFile {
                root: guest.root_bytes(),
                path: bytes(path),
                append: false,
                mode: 0,
                user: String::new(),
            };
            let mut end = guest.call(Call::WriteFile(request)).await;
            end.inputs.send(Input::Data(bytes("half"))).await.unwrap();
            for _ in 0..400 {
                if guest
                    .names()
                    .iter()
                    .any(|name| name.starts_with(".k8e-tmp-"))
                {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            drop(end);
            for _ in 0..400 {
                if guest.names() == ["kept"] {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            assert_eq!(guest.names(), ["kept"]);
            assert_eq!(std::fs::read(guest.root.join("kept")).unwrap(), b"old");
        }
    });
}

#[test]
fn a_full_disk_is_reported_and_leaves_nothing() {
    with_guest(async |guest| {
        let disk = guest.root.join("disk");
        std::fs::create_dir(&disk).unwrap();
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("tmpfs", &disk, "tmpfs", flags, Some(c"size=1m"))
            .expect("this test mounts a tmpfs");
        let error = guest
            .write(b"disk/big", &vec![1; 8 * 1024 * 1024], false, 0)
            .await
            .unwrap_err();
        let left = std::fs::read_dir(&disk).unwrap().count();
        rustix::mount::unmount(&disk, rustix::mount::UnmountFlags::DETACH).unwrap();
        assert_eq!((error.code(), left), (ErrorCode::Exhausted, 0));
        assert!(error.message.contains("disk limit"), "{}", error.message);
    });
}

#[test]
fn listing() {
    with_guest(async |guest| {
        for n in 0..1000 {
            std::fs::write(guest.root.join(format!("file-{n}")), "x").unwrap();
        }
        std::fs::create_dir_all(guest.root.join("d/e")).unwrap();
        std::fs::write(guest.root.join("d/e/f"), "x").unwrap();
        symlink("/", guest.root.join("d/root")).unwrap();
        let (flat, truncated) = guest.list(ListFiles::default()).await.unwrap();
        assert_eq!((flat.len(), truncated), (1001, false));
        let (deep, truncated) = guest
            .list(ListFiles {
                recursive: true,
                ..ListFiles::default()
            })
            .await
            .unwrap();
        assert_eq!((deep.len(), truncated), (1004, false));
        let link = deep
            .iter()
            .find(|file| file.path.ends_with(b"d/root"))
            .unwrap();
        assert_eq!(
            (link.r#type(), link.symlink_target.as_ref()),
            (FileType::Symlink, &b"/"[..])
        );
        let (cut, truncated) = guest
            .list(ListFiles {
                entries_max: 300,
                ..ListFiles::default()
            })
            .await
            .unwrap();
        assert_eq!((cut.len(), truncated), (300, true));
        let (exact, truncated) = guest
            .list(ListFiles {
                entries_max: 1001,
                ..ListFiles::default()
            })
            .await
            .unwrap();
        assert_eq!((exact.len(), truncated), (1001, false));
        let (shallow, truncated) = guest
            .list(ListFiles {
                recursive: true,
                depth: 1,
                ..ListFiles::default()
            })
            .await
            .unwrap();
        assert_eq!((shallow.len(), truncated), (1001, false));
        let since = ListFiles {
            since_unix_s: 4_000_000_000,
            recursive: true,
            ..ListFiles::default()
        };
        assert_eq!(guest.list(since).await.unwrap().0.len(), 0);
        let file = ListFiles {
            path: bytes("file-1"),
            ..ListFiles::default()
        };
        assert_eq!(code(guest.list(file).await), ErrorCode::NotDirectory);
        let missing = ListFiles {
            path: bytes("missing"),
            ..ListFiles::default()
        };
        assert_eq!(code(guest.list(missing).await), ErrorCode::NotFound);
    });
}

#[test]
fn make_move_remove() {
    with_guest(async |guest| {
        guest.make_dir("a/b/c", true, 0).await.unwrap();
        guest.make_dir("a/b/c", true, 0).await.unwrap();
        guest.make_dir("private", false, 0o1777).await.unwrap();
        assert_eq!(guest.stat("private").await.unwrap().mode, 0o1777);
        assert_eq!(code(guest.make_dir("a", false, 0).await), ErrorCode::Exists);
        assert_eq!(
            code(guest.make_dir("x/y", false, 0).await),
            ErrorCode::NotFound
        );
        guest.write(b"a/file", b"1", false, 0).await.unwrap();
        assert_eq!(
            code(guest.make_dir("a/file", true, 0).await),
            ErrorCode::Exists
        );
        assert_eq!(
            code(guest.make_dir("a/file/x", true, 0).await),
            ErrorCode::NotDirectory
        );

        guest.rename("a/file", "moved").await.unwrap();
        assert_eq!(guest.read(b"moved", 0, 0).await.unwrap().1, b"1");
        assert_eq!(code(guest.rename("a/file", "x").await), ErrorCode::NotFound);
        assert_eq!(
            code(guest.rename("moved", "no/such/dir").await),
            ErrorCode::NotFound
        );
        assert_eq!(code(guest.rename("", "x").await), ErrorCode::Invalid);
        assert_eq!(
            code(guest.rename("a", "a/b/inside").await),
            ErrorCode::Invalid
        );

        let error = guest.remove("a", false).await.unwrap_err();
        assert!(error.message.contains("not empty"), "{}", error.message);
        guest.remove("a", true).await.unwrap();
        guest.remove("private", false).await.unwrap();
        guest.remove("moved", false).await.unwrap();
        assert_eq!(code(guest.remove("moved", true).await), ErrorCode::NotFound);
        assert_eq!(code(guest.remove("", true).await), ErrorCode::Invalid);
        assert_eq!(guest.names(), Vec::<String>::new());
    });
}

#[test]
fn a_very_deep_tree_is_listed_in_part_and_removed_whole() {
    with_guest(async |guest| {
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY;
        let mode = rustix::fs::Mode::from_raw_mode(0o755);
        let mut dir = rustix::fs::open(&guest.root, flags, mode).unwrap();
        for _ in 0..3000 {
            rustix::fs::mkdirat(&dir, c"d", mode).unwrap();
            dir = rustix::fs::openat(&dir, c"d", flags, mode).unwrap();
        }
        drop(dir);
        let (listed, truncated) = guest
            .list(ListFiles {
                recursive: true,
                ..ListFiles::default()
            })
            .await
            .unwrap();
        assert_eq!((listed.len(), truncated), (64, true));
        guest.remove("d", true).await.unwrap();
        assert_eq!(guest.names(), Vec::<String>::new());
    });
}
