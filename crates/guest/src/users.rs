//! User lookup for a command: `/etc/passwd` and `/etc/group` of the sandbox, which code in it may have rewritten.

use crate::error::Error;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;

/// Bytes read of either file. Users beyond that can be named by number.
const FILE_BYTES_MAX: u64 = 1024 * 1024;

/// Supplementary groups of a user that are used; the kernel's bound is 65536.
const GROUPS_MAX: usize = 256;

/// A user of the sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct User {
    /// Name, or the number where there is none.
    pub(crate) name: Vec<u8>,
    /// User id.
    pub(crate) uid: u32,
    /// Group id.
    pub(crate) gid: u32,
    /// Supplementary groups.
    pub(crate) groups: Vec<u32>,
    /// Home directory.
    pub(crate) home: Vec<u8>,
}

// === impl User ===

impl User {
    /// Looks up a name or a number; empty is root, which needs no file.
    pub(crate) fn find(user: &str) -> Result<Self, Error> {
        if matches!(user, "" | "root" | "0") {
            return Ok(Self::root());
        }
        let passwd = read("/etc/passwd");
        let number = user.parse::<u32>().ok().filter(|uid| *uid != u32::MAX);
        let found = lines(&passwd)
            .filter_map(parse_passwd)
            .find(|known| number.map_or(known.name == user.as_bytes(), |uid| known.uid == uid));
        let mut user = match (found, number) {
            (Some(found), _) => found,
            (None, Some(uid)) => Self {
                name: user.as_bytes().to_vec(),
                uid,
                gid: uid,
                groups: Vec::new(),
                home: b"/".to_vec(),
            },
            (None, None) => {
                return Err(Error::Invalid(format!(
                    "user {user:?} is not in /etc/passwd of the sandbox"
                )));
            }
        };
        user.groups = groups_of(&user.name, &read("/etc/group"));
        Ok(user)
    }

    /// Root, as in every sandbox.
    pub(crate) fn root() -> Self {
        Self {
            name: b"root".to_vec(),
            uid: 0,
            gid: 0,
            groups: Vec::new(),
            home: b"/root".to_vec(),
        }
    }
}

fn parse_passwd(line: &[u8]) -> Option<User> {
    let mut fields = line.split(|byte| *byte == b':');
    let name = fields.next()?.to_vec();
    let (uid, gid) = (number(fields.nth(1)?)?, number(fields.next()?)?);
    let home = fields
        .nth(1)
        .filter(|home| home.first() == Some(&b'/'))
        .unwrap_or(b"/")
        .to_vec();
    Some(User {
        name,
        uid,
        gid,
        groups: Vec::new(),
        home,
    })
}

fn groups_of(user: &[u8], group_file: &[u8]) -> Vec<u32> {
    let gid_with_user = |line: &[u8]| {
        let mut fields = line.split(|byte| *byte == b':').skip(2);
        let gid = number(fields.next()?)?;
        let mut members = fields.next()?.split(|byte| *byte == b',');
        members.any(|member| member == user).then_some(gid)
    };
    lines(group_file)
        .filter_map(gid_with_user)
        .take(GROUPS_MAX)
        .collect()
}

fn number(field: &[u8]) -> Option<u32> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

fn lines(file: &[u8]) -> impl Iterator<Item = &[u8]> {
    file.split(|byte| *byte == b'\n')
}

/// Empty when there is no such file, or when it is a FIFO or a device.
fn read(path: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Ok(file) = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        && file.metadata().is_ok_and(|metadata| metadata.is_file())
    {
        // After an error the part that was read is used: a truncated file only lacks users.
        let _ = file.take(FILE_BYTES_MAX).read_to_end(&mut bytes);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwd_lines_are_read_or_passed_over() {
        let user = parse_passwd(b"bob:x:1000:1001:Bob:/home/bob:/bin/sh").unwrap();
        assert_eq!(
            (user.uid, user.gid, user.home.as_slice()),
            (1000, 1001, &b"/home/bob"[..])
        );
        assert_eq!(parse_passwd(b"x:y:1:2").unwrap().home, b"/");
        assert_eq!(parse_passwd(b"garbage"), None);
        assert_eq!(parse_passwd(b"a:b:-1:2:::"), None);
    }

    #[test]
    fn groups_come_from_the_member_list() {
        let file = b"root:x:0:\naudio:x:29:bob,eve\nbob:x:1001:\nvideo:x:44:eve,bobby\n";
        assert_eq!(groups_of(b"bob", file), vec![29]);
    }

    #[test]
    fn root_needs_no_file_and_numbers_need_no_line() {
        assert_eq!(User::find("").unwrap(), User::root());
        assert_eq!(User::find("4000123").unwrap().gid, 4000123);
        assert!(User::find("nobody-like-this").is_err());
    }
}
