//! Files as `envd` describes them.

use super::time::rfc3339;
use k8e_engine::{FileInfo, FileKind};
use serde_json::{Value, json};

/// A file; `target` describes what a symbolic link leads to, if that exists.
pub(super) fn entry(info: &FileInfo, target: Option<&FileInfo>) -> Value {
    let seen = target.unwrap_or(info);
    let path = String::from_utf8_lossy(&info.path).into_owned();
    let path = if path.is_empty() {
        "/".to_owned()
    } else {
        path
    };
    let name = path.rsplit('/').next().filter(|name| !name.is_empty());
    let mut entry = json!({
        "name": name.unwrap_or("/"),
        "type": kind(seen.kind),
        "path": path,
        // 64-bit numbers are text in protobuf's JSON.
        "size": seen.size.to_string(),
        "mode": seen.mode & 0o777,
        "permissions": permissions(info.kind, seen.mode),
        "owner": user(seen.uid),
        "group": user(seen.gid),
        "modifiedTime": rfc3339(seen.mtime_unix_ns.div_euclid(1_000_000)),
    });
    if info.kind == FileKind::Symlink {
        entry["symlinkTarget"] = String::from_utf8_lossy(&info.symlink_target).into();
        entry["isSymlink"] = true.into();
    }
    entry
}

fn kind(kind: FileKind) -> &'static str {
    match kind {
        FileKind::File => "FILE_TYPE_FILE",
        FileKind::Directory => "FILE_TYPE_DIRECTORY",
        FileKind::Symlink => "FILE_TYPE_SYMLINK",
        FileKind::Other => "FILE_TYPE_UNSPECIFIED",
    }
}

/// The users that every sandbox has by name, others by number.
fn user(id: u32) -> String {
    match id {
        0 => "root".to_owned(),
        1000 => "user".to_owned(),
        id => id.to_string(),
    }
}

/// As Go writes them: `drwxr-xr-x`, `Lrwxrwxrwx`.
fn permissions(kind: FileKind, mode: u32) -> String {
    let first = match kind {
        FileKind::File => '-',
        FileKind::Directory => 'd',
        FileKind::Symlink => 'L',
        FileKind::Other => '?',
    };
    let bits = (0..9).rev().zip("rwxrwxrwx".chars());
    let bits = bits.map(|(bit, letter)| if mode >> bit & 1 == 1 { letter } else { '-' });
    std::iter::once(first).chain(bits).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permissions_are_written_as_go_does() {
        assert_eq!(permissions(FileKind::File, 0o644), "-rw-r--r--");
        assert_eq!(permissions(FileKind::Directory, 0o755), "drwxr-xr-x");
        assert_eq!(permissions(FileKind::Symlink, 0o777), "Lrwxrwxrwx");
    }
}
