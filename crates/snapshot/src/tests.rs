//! Trees that go through the store: saved, restored, collected, exported, imported.

use crate::*;
use bytes::Bytes;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;

const QUOTA: Quota = Quota {
    bytes_max: 64 << 20,
};
const KEY: [u8; KEY_BYTES] = [7; KEY_BYTES];

/// Paths and contents.
type Tree = BTreeMap<String, Vec<u8>>;

fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_be_bytes());
    hasher.finalize_xof().fill(&mut data);
    data
}

fn tree() -> Tree {
    let mut tree = Tree::new();
    for n in 0..200 {
        tree.insert(format!("f{n:03}"), noise(n, 3000));
    }
    tree.insert("large".to_owned(), noise(999, 3_000_000));
    tree.insert("text".to_owned(), b"all the same ".repeat(100_000));
    tree.insert("z-empty".to_owned(), Vec::new());
    tree
}

fn entry(path: &str, size: usize) -> Entry {
    Entry {
        path: Bytes::copy_from_slice(path.as_bytes()),
        kind: match path {
            "" => Kind::Directory,
            _ => Kind::File,
        }
        .into(),
        mode: 0o644,
        size: size as u64,
        ..Entry::default()
    }
}

fn save(owner: &mut Owner, tree: &Tree) -> (Root, String) {
    owner.mark_dirty().unwrap();
    let mut pass = Pass::new(Known::default(), true, 0);
    let mut entries = vec![entry("", 0)];
    entries.extend(tree.iter().map(|(path, data)| entry(path, data.len())));
    for batch in entries.chunks(50) {
        let wanted = pass.batch(owner, batch.to_vec()).unwrap();
        for (index, entry) in batch.iter().enumerate().filter(|(at, _)| wanted[*at]) {
            let data = &tree[std::str::from_utf8(&entry.path).unwrap()];
            let mut offset = 0;
            for part in data.chunks(100_000) {
                pass.piece(owner, index, offset, part, None).unwrap();
                offset += part.len() as u64;
            }
            pass.piece(owner, index, 0, &[], Some(offset)).unwrap();
        }
    }
    let saved = pass.finish_snapshot(owner, &Meta::default()).unwrap();
    owner.mark_clean().unwrap();
    saved
}

fn restored(owner: &mut Owner, root: &Root) -> Tree {
    let (mut tree, mut batch) = (Tree::new(), Vec::new());
    restore(owner, root, |step| {
        match step {
            Step::Entries(entries) => {
                for entry in entries.iter().filter(|entry| !entry.path.is_empty()) {
                    let path = String::from_utf8(entry.path.to_vec()).unwrap();
                    tree.insert(path, vec![0; usize::try_from(entry.size).unwrap()]);
                }
                batch = entries;
            }
            Step::Pieces(pieces) => {
                for piece in pieces {
                    let path = std::str::from_utf8(&batch[piece.index].path).unwrap();
                    let file = tree.get_mut(path).unwrap();
                    let at = usize::try_from(piece.offset).unwrap();
                    file[at..at + piece.data.len()].copy_from_slice(&piece.data);
                }
            }
        }
        Ok(())
    })
    .unwrap();
    tree
}

fn packs(dir: &Path) -> usize {
    let names = std::fs::read_dir(dir).unwrap().flatten();
    names
        .filter(|entry| entry.path().extension().is_some_and(|e| e == "pack"))
        .count()
}

fn live(owner: &mut Owner, roots: &[&Root]) -> HashSet<Hash> {
    let mut live = HashSet::new();
    for root in roots {
        live.extend(root.chunks().unwrap());
        read_manifest(owner, root, |_, entry| {
            live.extend(entry.chunks()?);
            Ok(())
        })
        .unwrap();
    }
    live
}

#[test]
fn what_is_saved_is_restored_and_equal_chunks_are_stored_once() {
    let dir = tempfile::tempdir().unwrap();
    let mut owner = Owner::open(dir.path(), QUOTA).unwrap();
    let mut tree = tree();
    let (root, digest) = save(&mut owner, &tree);
    let whole = owner.added();
    assert_eq!(restored(&mut owner, &root), tree);
    drop(owner);
    // From disk, and with two of two hundred files changed.
    let mut owner = Owner::open(dir.path(), QUOTA).unwrap();
    assert_eq!(
        Root::decode_checked(&owner.root(&digest).unwrap()).unwrap(),
        root
    );
    tree.insert("f007".to_owned(), noise(5000, 3000));
    tree.insert("f107".to_owned(), noise(5001, 3000));
    let (second, _) = save(&mut owner, &tree);
    assert!(
        owner.added() * 100 <= whole * 3,
        "{} of {whole}",
        owner.added()
    );
    assert_eq!(restored(&mut owner, &second), tree);
}

#[test]
fn a_collection_removes_what_nothing_names_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let mut owner = Owner::open(dir.path(), QUOTA).unwrap();
    let one = tree();
    let mut two = one.clone();
    two.insert("large".to_owned(), noise(77, 20_000_000));
    let (first, _) = save(&mut owner, &one);
    let (second, digest) = save(&mut owner, &two);
    let before = owner.bytes();
    let keep = live(&mut owner, &[&second]);
    owner.keep_roots(&HashSet::from([digest])).unwrap();
    owner.collect(&keep).unwrap();
    assert!(owner.bytes() < before);
    assert_eq!(restored(&mut owner, &second), two);
    drop(owner);
    let mut owner = Owner::open(dir.path(), QUOTA).unwrap();
    assert_eq!(restored(&mut owner, &second), two, "also from disk");
    assert!(read_manifest(&mut owner, &first, |_, _| Ok(())).is_err());
    owner.collect(&HashSet::new()).unwrap();
    assert_eq!((packs(dir.path()), owner.bytes()), (0, 0));
}

#[test]
fn a_changed_byte_of_a_pack_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let mut owner = Owner::open(dir.path(), QUOTA).unwrap();
    let (root, _) = save(&mut owner, &tree());
    drop(owner);
    let pack = dir.path().join("00000001.pack");
    let good = std::fs::read(&pack).unwrap();
    for at in [10, good.len() / 2, good.len() - 100, good.len() - 3] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        std::fs::write(&pack, bad).unwrap();
        let read = Owner::open(dir.path(), QUOTA)
            .and_then(|mut owner| restore(&mut owner, &root, |_| Ok(())));
        assert!(
            matches!(read, Err(SnapshotError::Damaged(_))),
            "{at}: {read:?}"
        );
    }
}

#[test]
fn an_archive_is_taken_whole_or_not_at_all() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let mut owner = Owner::open(dirs[0].path(), QUOTA).unwrap();
    let mut tree = tree();
    tree.retain(|path, _| path.starts_with("f00") || path == "text");
    let (_, digest) = save(&mut owner, &tree);
    let info = ArchiveInfo {
        name: "one".to_owned(),
        owner: "me".to_owned(),
    };
    let root = owner.root(&digest).unwrap();
    let mut archive = Vec::new();
    export(&mut owner, &root, &info, &KEY, &mut archive).unwrap();
    let take = |bytes: &[u8], key: &[u8; KEY_BYTES], expected: Option<&str>| {
        let mut other = Owner::open(dirs[1].path(), QUOTA).unwrap();
        let taken = import(&mut other, bytes, key, expected);
        taken.map(|(_, root, _, _)| restored(&mut other, &root))
    };
    assert!(take(&archive, &KEY, Some("you")).is_err(), "another owner");
    assert!(
        take(&archive, &[8; KEY_BYTES], Some("me")).is_err(),
        "another server"
    );
    for at in (0..archive.len()).step_by(97) {
        let mut bad = archive.clone();
        bad[at] ^= 0x10;
        assert!(take(&bad, &KEY, Some("me")).is_err(), "byte {at}");
        assert!(take(&archive[..at], &KEY, None).is_err(), "cut at {at}");
    }
    assert_eq!(packs(dirs[1].path()), 0, "nothing of these is kept");
    assert_eq!(take(&archive, &KEY, Some("me")).unwrap(), tree);
    assert_eq!(take(&archive, &[8; KEY_BYTES], None).unwrap(), tree);
}

#[test]
fn a_quota_ends_a_save_and_what_was_written_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let quota = Quota {
        bytes_max: 20 << 20,
    };
    let mut owner = Owner::open(dir.path(), quota).unwrap();
    let mut pass = Pass::new(Known::default(), true, 0);
    let data = noise(1, 1 << 20);
    pass.batch(&mut owner, vec![entry("", 0), entry("big", 1 << 30)])
        .unwrap();
    let failed = (0..40).find_map(|n: u64| {
        let mut data = data.clone();
        data.iter_mut().for_each(|byte| *byte ^= n.to_be_bytes()[7]);
        let pushed = pass.piece(&mut owner, 1, n << 20, &data, None);
        pushed.err()
    });
    assert!(
        matches!(failed, Some(SnapshotError::Quota(_))),
        "{failed:?}"
    );
    drop(owner);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_guest_that_breaks_the_order_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut owner = Owner::open(dir.path(), QUOTA).unwrap();
    let begin = |owner: &mut Owner| {
        let mut pass = Pass::new(Known::default(), true, 0);
        let batch = vec![entry("", 0), entry("a", 10), entry("b", 10)];
        assert_eq!(pass.batch(owner, batch).unwrap(), [false, true, true]);
        pass
    };
    let owner = &mut owner;
    assert!(
        begin(owner).piece(owner, 0, 0, b"x", None).is_err(),
        "a directory"
    );
    assert!(
        begin(owner).piece(owner, 9, 0, b"x", None).is_err(),
        "no entry"
    );
    let mut pass = begin(owner);
    pass.piece(owner, 1, 5, b"x", None).unwrap();
    assert!(pass.piece(owner, 1, 3, b"x", None).is_err(), "backwards");
    let mut pass = begin(owner);
    pass.piece(owner, 1, 0, b"x", None).unwrap();
    assert!(pass.piece(owner, 2, 0, b"x", None).is_err(), "two at once");
    let mut pass = begin(owner);
    pass.piece(owner, 1, 0, b"0123456789", Some(10)).unwrap();
    assert!(
        pass.batch(owner, vec![entry("c", 0)]).is_err(),
        "b did not come"
    );
}
