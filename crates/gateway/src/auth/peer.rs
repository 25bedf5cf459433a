//! Users and groups of this machine, from `/etc/passwd` and `/etc/group`.

/// Bytes read of such a file; they are small.
const FILE_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// Whether a peer with this uid and gid may use the Unix socket: root, or a member of the group.
pub(crate) fn may_enter(uid: u32, gid: u32, group: &str) -> bool {
    uid == 0 || is_member(uid, gid, group, &read("/etc/passwd"), &read("/etc/group"))
}

/// The same for a user whose groups are only known from the files.
pub(crate) fn user_may_enter(uid: u32, group: &str) -> bool {
    uid == 0 || {
        let passwd = read("/etc/passwd");
        let gid = primary_group(&passwd, uid);
        gid.is_some_and(|gid| is_member(uid, gid, group, &passwd, &read("/etc/group")))
    }
}

/// The gid of a group of this machine, if it exists.
pub fn group_id(group: &str) -> Option<u32> {
    find_group(&read("/etc/group"), group).map(|group| group.gid)
}

struct Group<'a> {
    gid: u32,
    members: &'a str,
}

fn is_member(uid: u32, gid: u32, group: &str, passwd: &str, groups: &str) -> bool {
    let Some(group) = find_group(groups, group) else {
        return false;
    };
    if group.gid == gid {
        return true;
    }
    let Some(user) = user_name(passwd, uid) else {
        return false;
    };
    group.members.split(',').any(|member| member == user)
}

/// A line is `name:password:gid:member,member`.
fn find_group<'a>(groups: &'a str, name: &str) -> Option<Group<'a>> {
    groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        if fields.next() != Some(name) {
            return None;
        }
        let gid = fields.nth(1)?.parse().ok()?;
        Some(Group {
            gid,
            members: fields.next().unwrap_or_default(),
        })
    })
}

/// A line is `name:password:uid:…`.
fn user_name(passwd: &str, uid: u32) -> Option<&str> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid) && !name.is_empty()).then_some(name)
    })
}

/// A line is `name:password:uid:gid:…`.
fn primary_group(passwd: &str, uid: u32) -> Option<u32> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':').skip(2);
        (fields.next()?.parse() == Ok(uid)).then(|| fields.next()?.parse().ok())?
    })
}

fn read(path: &str) -> String {
    use std::io::Read as _;
    let mut text = String::new();
    let read = std::fs::File::open(path)
        .and_then(|file| file.take(FILE_BYTES_MAX).read_to_string(&mut text));
    // A machine without the file has no groups: then only root may enter.
    if read.is_err() {
        text.clear();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0::/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\nbob:x:1001:1001::/:/bin/sh\n";
    const GROUPS: &str = "root:x:0:\nk8e:x:990:ann,carol\nk8e-other:x:991:bob\nbroken\n";

    #[test]
    fn members_are_let_in() {
        let check = |uid, gid, group| is_member(uid, gid, group, PASSWD, GROUPS);
        assert!(check(1000, 1000, "k8e"), "a supplementary member");
        assert!(check(1001, 990, "k8e"), "by primary group");
        assert!(
            !check(1001, 1001, "k8e"),
            "a member of a group with a longer name"
        );
        assert!(!check(4242, 4242, "k8e"), "a user without a name");
        assert!(!check(1000, 1000, "missing"), "no such group");
    }

    #[test]
    fn a_user_has_a_primary_group() {
        assert_eq!(primary_group(PASSWD, 1001), Some(1001));
        assert_eq!(primary_group(PASSWD, 4242), None);
        assert!(user_may_enter(0, "missing"));
    }

    #[test]
    fn groups_are_found() {
        assert_eq!(find_group(GROUPS, "k8e").map(|group| group.gid), Some(990));
        assert!(find_group(GROUPS, "broken").is_none());
    }
}
