//! File calls, and which files are visible.

use super::Lab;
use super::call::{ROOT, bytes};
use bytes::Bytes;
use k8e_wire::proto::{self, ErrorCode, reply::Reply, request::Call};

/// Write, read, list, move and remove files.
pub async fn files_can_be_written_read_listed_moved_removed(lab: &mut Lab) {
    let cell = lab.launch().await;
    let (host, root) = (cell.host(), Bytes::from_static(ROOT));
    let big: Vec<u8> = (0..3_000_000_u32).map(|n| n.to_le_bytes()[1]).collect();
    host.write("a/b/big", &big).await.expect("written");
    assert!(host.read("a/b/big").await.expect("read") == big);
    assert_eq!(cell.sh("wc -c < a/b/big").await.out(), "3000000");
    cell.sh("echo from inside > a/inside").await;
    assert_eq!(host.read("a/inside").await.expect("read"), b"from inside\n");
    let list = proto::ListFiles {
        root: root.clone(),
        path: bytes("a"),
        recursive: true,
        ..Default::default()
    };
    let replies = host.done(Call::ListFiles(list)).await.expect("listed");
    let mut entries = 0;
    for reply in replies {
        if let Reply::Files(list) = reply {
            entries += list.files.len();
        }
    }
    assert_eq!(entries, 3);
    let rename = proto::Move {
        root: root.clone(),
        from: bytes("a/b/big"),
        to: bytes("c"),
        parents: false,
        user: String::new(),
    };
    host.done(Call::Move(rename)).await.expect("moved");
    assert_eq!(
        host.read("a/b/big").await.expect_err("it is gone").code(),
        ErrorCode::NotFound
    );
    let remove = proto::Remove {
        root,
        path: bytes("a"),
        recursive: true,
    };
    host.done(Call::Remove(remove)).await.expect("removed");
    assert_eq!(cell.sh("ls /workspace").await.out(), "c");
}

/// File calls do not follow symbolic links out of the root.
pub async fn symlinks_do_not_escape_the_root(lab: &mut Lab) {
    let cell = lab.launch().await;
    cell.sh("ln -s /etc/passwd out; ln -s c in; echo ok > c; ln -s .. up; ln -s /workspace/c abs")
        .await;
    let host = cell.host();
    for path in ["out", "up/etc/passwd", "../etc/passwd", "/etc/passwd"] {
        let refused = host.read(path).await.expect_err(path);
        assert_eq!(refused.code(), ErrorCode::Outside, "{path}: {refused:?}");
    }
    for path in ["in", "abs", "/workspace/c"] {
        assert_eq!(host.read(path).await.expect(path), b"ok\n");
    }
}

/// Programs of the host are visible; its other files are not.
pub async fn the_hosts_files_are_not_there(lab: &mut Lab) {
    let cell = lab.launch().await;
    let script = "ls /etc/shadow /etc/ssh /var/lib/dpkg /boot /home/* /root /srv 2>/dev/null | grep -v -e : -e ^$ -e ^user$; ls -d /usr/bin/env";
    assert_eq!(cell.sh(script).await.out(), "/usr/bin/env");
    cell.sh("rm -rf /usr/bin/env; echo mine > /usr/bin/id")
        .await;
    assert!(
        std::path::Path::new("/usr/bin/env").exists(),
        "the host lost a file"
    );
    assert!(std::fs::metadata("/usr/bin/id").is_ok_and(|meta| meta.len() > 100));
    let other = lab.launch().await;
    assert_eq!(
        other.sh("ls -d /usr/bin/env; id -u").await.out(),
        "/usr/bin/env\n0"
    );
}
