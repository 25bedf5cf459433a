//! What is packed is unpacked again as it was.

use super::*;
use crate::{Compression, LayerLimits, unpack};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::time::{Duration, UNIX_EPOCH};

fn packed(dir: &Path) -> Result<(File, Digest, u64), ImageError> {
    let file = tempfile::tempfile().unwrap();
    let (digest, bytes) = pack(dir, &file)?;
    Ok((file, digest, bytes))
}

/// Every path with what is known about it.
fn seen(dir: &Path) -> Vec<String> {
    let mut all = Vec::new();
    let mut left = vec![dir.to_owned()];
    while let Some(path) = left.pop() {
        let meta = fs::symlink_metadata(&path).unwrap();
        let content = match meta.file_type() {
            kind if kind.is_dir() => {
                left.extend(
                    fs::read_dir(&path)
                        .unwrap()
                        .map(|entry| entry.unwrap().path()),
                );
                String::new()
            }
            kind if kind.is_symlink() => format!("{:?}", fs::read_link(&path).unwrap()),
            kind if kind.is_file() => format!("{:?}", fs::read(&path).unwrap()),
            kind => format!("{kind:?}"),
        };
        let links = if meta.is_dir() { 0 } else { meta.nlink() };
        let (owner, mode) = ((meta.uid(), meta.gid()), meta.mode());
        let time = (meta.mtime(), meta.mtime_nsec());
        let name = path.strip_prefix(dir).unwrap().as_os_str().as_bytes();
        all.push(format!(
            "{name:?} {mode:o} {owner:?} {time:?} {links} {content}"
        ));
    }
    all.sort();
    all
}

#[test]
fn a_directory_is_the_same_when_it_is_unpacked_as_root() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::create_dir_all(at("usr/bin")).unwrap();
    fs::write(at("usr/bin/tool"), [7; 1000]).unwrap();
    fs::set_permissions(at("usr/bin/tool"), fs::Permissions::from_mode(0o4755)).unwrap();
    fs::hard_link(at("usr/bin/tool"), at("usr/same")).unwrap();
    symlink("usr/bin", at("bin")).unwrap();
    symlink("x".repeat(300), at("far")).unwrap();
    let long = format!("{}/{}", "d".repeat(120), "f".repeat(200));
    fs::create_dir(at(&"d".repeat(120))).unwrap();
    fs::write(at(&long), "").unwrap();
    std::os::unix::fs::chown(at(&long), Some(1000), Some(65535)).unwrap();
    fs::write(at("odd\nname \u{e9}"), "x").unwrap();
    for (name, time) in [
        ("bin/tool", UNIX_EPOCH + Duration::from_millis(1_500)),
        (
            "odd\nname \u{e9}",
            UNIX_EPOCH - Duration::from_millis(1_250),
        ),
    ] {
        File::options()
            .write(true)
            .open(at(name))
            .unwrap()
            .set_modified(time)
            .unwrap();
    }
    rustix::fs::mknodat(
        rustix::fs::CWD,
        at("pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    // Left out.
    let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
    let (file, digest, bytes) = packed(dir.path()).unwrap();
    assert_eq!(file.metadata().unwrap().len(), bytes);
    let again = packed(dir.path()).unwrap();
    assert_eq!(again.1, digest, "the same directory is the same layer");
    fs::remove_file(at("socket")).unwrap();
    // The directory itself has changed by that.
    let time = fs::metadata(dir.path()).unwrap().modified().unwrap();
    let to = tempfile::tempdir().unwrap();
    let root = OwnedFd::from(File::open(to.path()).unwrap());
    let mut from = file;
    std::io::Seek::rewind(&mut from).unwrap();
    let unpacked = unpack(from, Compression::None, root, LayerLimits::default()).unwrap();
    assert_eq!(unpacked.diff_id, digest);
    File::open(to.path()).unwrap().set_modified(time).unwrap();
    assert_eq!(seen(to.path()), seen(dir.path()));
}

#[test]
fn what_cannot_be_packed_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let error = |dir: &Path| packed(dir).unwrap_err().to_string();
    assert!(error(&dir.path().join("none")).contains("none"));
    fs::write(dir.path().join("file"), "").unwrap();
    assert!(error(&dir.path().join("file")).contains("not a directory"));
    fs::create_dir(dir.path().join("a")).unwrap();
    fs::write(dir.path().join("a/.wh.file"), "").unwrap();
    assert!(error(dir.path()).contains(".wh."));
    let deep = tempfile::tempdir().unwrap();
    fs::create_dir_all(deep.path().join("d/".repeat(129))).unwrap();
    assert!(error(deep.path()).contains("deeper"));
}
