//! Layers that are whole, and those that try to get out.

use super::*;
use proptest::prelude::*;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use tar::{Builder, EntryType, Header};

const LIMITS: LayerLimits = LayerLimits {
    bytes_max: 64 << 20,
    entries_max: 1000,
};

/// An archive to be; names go in as they are, however wrong.
#[derive(Default)]
struct Layer(Vec<u8>);

impl Layer {
    fn raw(
        mut self,
        kind: u8,
        name: &str,
        link: &str,
        data: &[u8],
        change: impl FnOnce(&mut Header),
    ) -> Self {
        let mut header = Header::new_ustar();
        let bytes = header.as_mut_bytes();
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        bytes[157..157 + link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(EntryType::new(kind));
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1_000_000_000);
        header.set_size(data.len() as u64);
        change(&mut header);
        header.set_cksum();
        self.0.extend_from_slice(header.as_bytes());
        self.0.extend_from_slice(data);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    fn file(self, name: &str, data: &[u8]) -> Self {
        self.raw(b'0', name, "", data, |_| {})
    }

    fn dir(self, name: &str) -> Self {
        self.raw(b'5', name, "", b"", |header| header.set_mode(0o755))
    }

    fn link(self, name: &str, target: &str) -> Self {
        self.raw(b'2', name, target, b"", |_| {})
    }

    fn hard(self, name: &str, target: &str) -> Self {
        self.raw(b'1', name, target, b"", |_| {})
    }

    /// PAX records, each `KEY=VALUE`, for the entry that follows.
    fn pax(self, records: &[&[u8]]) -> Self {
        let mut data = Vec::new();
        for record in records {
            let mut length = record.len() + 3;
            while length != record.len() + 2 + length.to_string().len() {
                length += 1;
            }
            data.extend_from_slice(format!("{length} ").as_bytes());
            data.extend_from_slice(record);
            data.push(b'\n');
        }
        self.raw(b'x', "PaxHeaders/x", "", &data, |_| {})
    }

    fn end(mut self) -> Vec<u8> {
        self.0.extend([0; 1024]);
        self.0
    }

    fn unpack(self) -> Result<(tempfile::TempDir, Unpacked), ImageError> {
        unpack_bytes(&self.end(), Compression::None, LIMITS)
    }

    #[track_caller]
    fn refused(self, says: &str) {
        let error = self.unpack().expect_err("it must be refused").to_string();
        assert!(error.contains(says), "{error}");
    }
}

fn unpack_bytes(
    bytes: &[u8],
    compression: Compression,
    limits: LayerLimits,
) -> Result<(tempfile::TempDir, Unpacked), ImageError> {
    assert!(
        rustix::process::geteuid().is_root(),
        "this test changes owners: run it as root"
    );
    // A guard around it: what gets out of the root is seen.
    let above = tempfile::tempdir().unwrap();
    let root = above.path().join("root");
    fs::create_dir(&root).unwrap();
    let fd = OwnedFd::from(fs::File::open(&root).unwrap());
    let unpacked = unpack(bytes, compression, fd, limits);
    let beside: Vec<_> = fs::read_dir(above.path()).unwrap().collect();
    assert_eq!(beside.len(), 1, "something is outside: {beside:?}");
    Ok((above, unpacked?))
}

fn root(dir: &tempfile::TempDir) -> std::path::PathBuf {
    dir.path().join("root")
}

fn xattr(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut buffer = vec![0; 4096];
    let read = rustix::fs::lgetxattr(path, name, &mut buffer[..]).ok()?;
    buffer.truncate(read);
    Some(buffer)
}

#[test]
fn files_have_what_the_archive_says() {
    let layer = Layer::default()
        .raw(b'5', "./", "", b"", |header| header.set_mode(0o711))
        .dir("etc/")
        .raw(b'0', "etc/passwd", "", b"root", |header| {
            header.set_mode(0o4755);
            header.set_uid(1000);
            header.set_gid(65535);
        })
        .link("bin", "usr/bin")
        .hard("etc/passwd-", "./etc/passwd")
        .file("no/parents/here", b"x")
        .raw(b'6', "run/pipe", "", b"", |_| {})
        .pax(&[
            b"path=a/long/name",
            b"mtime=12.5",
            b"SCHILY.xattr.user.note=one\ntwo",
            b"SCHILY.xattr.security.capability=\x01\n",
            b"SCHILY.xattr.user.overlay.opaque=y",
        ])
        .file("short", b"long");
    let bytes = layer.end();
    let (dir, unpacked) = unpack_bytes(&bytes, Compression::None, LIMITS).unwrap();
    let at = |path: &str| root(&dir).join(path);
    assert_eq!(unpacked.diff_id, crate::digest_of(&bytes));
    assert_eq!((unpacked.entries, unpacked.bytes), (13, 13 * 4096));
    let passwd = fs::metadata(at("etc/passwd")).unwrap();
    assert_eq!(
        (passwd.uid(), passwd.gid(), passwd.mode() & 0o7777),
        (1000, 65535, 0o4755)
    );
    assert_eq!((passwd.nlink(), passwd.mtime()), (2, 1_000_000_000));
    assert_eq!(passwd.ino(), fs::metadata(at("etc/passwd-")).unwrap().ino());
    assert_eq!(fs::metadata(at("etc")).unwrap().mtime(), 1_000_000_000);
    assert_eq!(fs::metadata(at("")).unwrap().mode() & 0o777, 0o711);
    assert_eq!(fs::read_link(at("bin")).unwrap(), Path::new("usr/bin"));
    assert_eq!(fs::read(at("no/parents/here")).unwrap(), b"x");
    assert!(
        fs::symlink_metadata(at("run/pipe"))
            .unwrap()
            .file_type()
            .is_fifo()
    );
    let long = fs::metadata(at("a/long/name")).unwrap();
    assert_eq!((long.mtime(), long.mtime_nsec()), (12, 500_000_000));
    assert_eq!(xattr(&at("a/long/name"), "user.note").unwrap(), b"one\ntwo");
    assert_eq!(xattr(&at("a/long/name"), "user.overlay.opaque"), None);
    assert_eq!(xattr(&at("a/long/name"), "security.capability"), None);
}

#[test]
fn nothing_gets_out() {
    Layer::default().file("../x", b"").refused("\"..\"");
    Layer::default().file("a/../../x", b"").refused("\"..\"");
    Layer::default()
        .hard("x", "../../etc/passwd")
        .refused("\"..\"");
    Layer::default()
        .link("a", "/tmp")
        .file("a/x", b"")
        .refused("symbolic link");
    Layer::default()
        .link("a", "..")
        .dir("a/b")
        .refused("symbolic link");
    Layer::default()
        .link("a", "/etc")
        .hard("x", "a/passwd")
        .refused("does not have");
    Layer::default()
        .link("a", "/etc")
        .raw(b'0', "a/.wh.passwd", "", b"", |_| {})
        .refused("symbolic link");
    Layer::default()
        .link("a", "/etc")
        .raw(b'0', "a/.wh..wh..opq", "", b"", |_| {})
        .refused("symbolic link");
    Layer::default()
        .hard("x", "etc/passwd")
        .refused("does not have");
    Layer::default()
        .dir("d")
        .hard("x", "d")
        .refused("not a file");
    Layer::default()
        .file("f", b"")
        .file("f/x", b"")
        .refused("not a directory");
    // A file takes the place of a link and does not go through it.
    let (dir, _) = Layer::default()
        .link("a", "/etc/hostname")
        .file("a", b"mine")
        .unpack()
        .unwrap();
    assert_eq!(fs::read(root(&dir).join("a")).unwrap(), b"mine");
    // Absolute names are below the root.
    let (dir, _) = Layer::default()
        .file("/etc/hostname", b"mine")
        .unpack()
        .unwrap();
    assert_eq!(fs::read(root(&dir).join("etc/hostname")).unwrap(), b"mine");
}

#[test]
fn what_a_sandbox_must_not_have_is_refused() {
    Layer::default()
        .raw(b'3', "x", "", b"", |_| {})
        .refused("device node");
    Layer::default()
        .raw(b'4', "etc/x", "", b"", |_| {})
        .refused("device node");
    let (dir, _) = Layer::default()
        .raw(b'3', "dev/null", "", b"", |_| {})
        .unpack()
        .unwrap();
    assert!(!root(&dir).join("dev/null").exists());
    Layer::default()
        .raw(b'0', "x", "", b"", |header| header.set_uid(65536))
        .refused("65535");
    Layer::default()
        .pax(&[b"uid=4294967295"])
        .file("x", b"")
        .refused("65535");
    Layer::default()
        .raw(b'9', "x", "", b"", |_| {})
        .refused("unknown type");
    Layer::default()
        .file("./", b"")
        .dir("x")
        .unpack()
        .map(drop)
        .unwrap();
    Layer::default().link(".", "x").refused("place of the root");
}

#[test]
fn whiteouts_are_what_overlayfs_has_for_them() {
    let whiteout = |layer: Layer, name: &str| layer.raw(b'0', name, "", b"", |_| {});
    let layer = Layer::default()
        .dir("a")
        .file("keep", b"k")
        .dir("redone-later");
    let layer = whiteout(layer, "a/.wh.gone");
    let layer = whiteout(layer, "b/.wh..wh..opq");
    let layer = whiteout(layer, ".wh.keep");
    let layer = whiteout(layer, ".wh.redone");
    let layer = layer.dir("redone").file("redone/new", b"n");
    let layer = whiteout(layer, ".wh.redone-later");
    let layer = whiteout(layer, ".wh.through").file("through/file", b"t");
    let layer = whiteout(layer, ".wh..wh.plnk");
    let (dir, _) = layer.unpack().unwrap();
    let at = |path: &str| root(&dir).join(path);
    let gone = fs::symlink_metadata(at("a/gone")).unwrap();
    assert!(gone.file_type().is_char_device() && gone.rdev() == 0);
    let opaque = |path: &str| xattr(&at(path), "user.overlay.opaque") == Some(b"y".to_vec());
    assert!(opaque("b") && !opaque("a"));
    assert_eq!(
        fs::read(at("keep")).unwrap(),
        b"k",
        "files of the same layer stay"
    );
    assert!(opaque("redone") && opaque("redone-later") && opaque("through"));
    assert_eq!(fs::read(at("redone/new")).unwrap(), b"n");
    assert!(!at(".wh..wh.plnk").exists());
    whiteout(Layer::default(), ".wh.").refused("names nothing");
    whiteout(Layer::default(), "a/.wh...").refused("names nothing");
}

#[test]
fn the_later_of_two_entries_stays() {
    let layer = Layer::default()
        .file("a", b"first")
        .file("a", b"second")
        .dir("d")
        .file("d/inside", b"x")
        .file("d", b"file now")
        .file("e", b"file")
        .dir("e")
        .dir("f")
        .file("f/kept", b"k")
        .raw(b'5', "f", "", b"", |header| header.set_mode(0o700));
    let (dir, _) = layer.unpack().unwrap();
    let at = |path: &str| root(&dir).join(path);
    assert_eq!(fs::read(at("a")).unwrap(), b"second");
    assert_eq!(fs::read(at("d")).unwrap(), b"file now");
    assert!(at("e").is_dir());
    assert_eq!(fs::read(at("f/kept")).unwrap(), b"k");
    assert_eq!(
        fs::metadata(at("f")).unwrap().permissions().mode() & 0o777,
        0o700
    );
}

#[test]
fn readers_that_would_disagree_are_not_lost() {
    // A size that only PAX says: a reader that passes it over takes the data for a header.
    let inner = Layer::default().file("hidden", b"").0;
    let layer = Layer::default()
        .pax(&[format!("size={}", inner.len()).as_bytes()])
        .raw(b'0', "outer", "", &inner, |header| header.set_size(0))
        .file("after", b"a");
    let (dir, _) = layer.unpack().unwrap();
    assert!(!root(&dir).join("hidden").exists() && root(&dir).join("after").exists());
    // A value with a newline does not make a record.
    let layer = Layer::default()
        .pax(&[b"comment=x\n9 size=99"])
        .file("a", b"abc")
        .file("b", b"");
    let (dir, _) = layer.unpack().unwrap();
    assert_eq!(fs::read(root(&dir).join("a")).unwrap(), b"abc");
    // Links have no data, whatever their size says.
    let layer = Layer::default()
        .raw(b'2', "l", "t", b"", |header| header.set_size(512))
        .file("b", b"");
    assert!(root(&layer.unpack().unwrap().0).join("b").exists());
    Layer::default()
        .pax(&[b"path=a"])
        .pax(&[b"path=b"])
        .file("c", b"")
        .refused("two extension headers");
    // GNU's name or PAX's: two readers take two files.
    Layer::default()
        .pax(&[b"path=a"])
        .raw(b'L', "l", "", b"b", |_| {})
        .file("c", b"")
        .refused("two names");
    // A directory without data, or a file with: what follows is data or an entry.
    let inner = Layer::default().file("hidden", b"").0;
    Layer::default()
        .raw(b'0', "dir/", "", &inner, |_| {})
        .refused("ends with a slash");
    Layer::default()
        .pax(&[b"size=+3"])
        .file("c", b"abc")
        .refused("PAX record");
    Layer::default()
        .pax(&[b"size=-1"])
        .file("c", b"")
        .refused("PAX record");
    Layer::default()
        .pax(&[b"path=a\0b"])
        .file("c", b"")
        .refused("PAX record");
    Layer::default()
        .raw(b'x', "p", "", b"99 path=x\n", |_| {})
        .file("c", b"")
        .refused("PAX record");
    Layer::default()
        .pax(&[b"path=a"])
        .refused("between a header and its entry");
    let mut broken = Layer::default().file("a", b"").0;
    broken[0] = b'b';
    assert!(unpack_bytes(&broken, Compression::None, LIMITS).is_err());
}

#[test]
fn bounds_hold() {
    let many = (0..1001).fold(Layer::default(), |layer, n| {
        layer.file(&format!("f{n}"), b"")
    });
    many.refused("entries");
    // Parents that are left out count as well: a short archive must not make a large tree.
    let deep = |n: u32| format!("d{n}{}", "/d".repeat(40));
    let many = (0..30).fold(Layer::default(), |layer, n| layer.file(&deep(n), b""));
    many.refused("entries");
    // And each entry takes a block, so that a quota of bytes bounds empty files too.
    let small = LayerLimits {
        bytes_max: 64 * 1024,
        entries_max: 1000,
    };
    let links = (0..20).fold(Layer::default(), |layer, n| {
        layer.link(&format!("l{n}"), "x")
    });
    let error = unpack_bytes(&links.end(), Compression::None, small).unwrap_err();
    assert_eq!(error.code(), k8e_model::Code::Exhausted, "{error}");
    Layer::default()
        .raw(b'x', "p", "", &vec![b'x'; (1 << 20) + 1], |_| {})
        .refused("extension header");
    Layer::default()
        .raw(b'L', "l", "", &[b'n'; 5000], |_| {})
        .file("x", b"")
        .refused("4096");
    let zeros = vec![0; 65 << 20];
    let bomb = Layer::default().file("zeros", &zeros).end();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    gzip.write_all(&bomb).unwrap();
    let error = unpack_bytes(&gzip.finish().unwrap(), Compression::Gzip, LIMITS).unwrap_err();
    assert_eq!(error.code(), k8e_model::Code::Exhausted, "{error}");
    // A sparse file that is all hole.
    let bomb = Layer::default()
        .pax(&[
            b"GNU.sparse.major=1",
            b"GNU.sparse.minor=0",
            b"GNU.sparse.name=big",
            b"GNU.sparse.realsize=1099511627776",
        ])
        .file("x", &[&b"0\n"[..], &[0; 510]].concat());
    bomb.refused("files of the layer");
    let cut = Layer::default().file("a", &[7; 2000]).0;
    assert!(unpack_bytes(&cut[..1024], Compression::None, LIMITS).is_err());
}

#[test]
fn sparse_files_are_whole_and_take_little() {
    let map = b"2\n0\n4\n1048576\n4\n";
    let mut data = map.to_vec();
    data.resize(512, 0);
    data.extend(b"headtail");
    let sparse = |records: &[&[u8]], data: &[u8]| Layer::default().pax(records).file("x", data);
    let one: &[&[u8]] = &[
        b"GNU.sparse.major=1",
        b"GNU.sparse.minor=0",
        b"GNU.sparse.name=s",
        b"GNU.sparse.realsize=2097152",
    ];
    let old: &[&[u8]] = &[
        b"GNU.sparse.map=0,4,1048576,4",
        b"GNU.sparse.name=s",
        b"GNU.sparse.size=2097152",
    ];
    let gnu = Layer::default().raw(b'S', "s", "", b"headtail", |header| {
        let bytes = header.as_mut_bytes();
        bytes[257..265].copy_from_slice(b"ustar  \0");
        for (at, value) in [
            (386, 0),
            (398, 4),
            (410, 1_048_576),
            (422, 4),
            (483, 2_097_152),
        ] {
            bytes[at..at + 12].copy_from_slice(format!("{value:011o}\0").as_bytes());
        }
    });
    for layer in [sparse(one, &data), sparse(old, b"headtail"), gnu] {
        let (dir, unpacked) = layer.unpack().unwrap();
        let path = root(&dir).join("s");
        let mut want = vec![0; 2 << 20];
        want[..4].copy_from_slice(b"head");
        want[1 << 20..][..4].copy_from_slice(b"tail");
        assert!(fs::read(&path).unwrap() == want);
        assert!(fs::metadata(&path).unwrap().blocks() * 512 < 64 << 10);
        assert_eq!(unpacked.bytes, 2 << 20);
    }
    sparse(one, b"1\n5\n4\nxx").refused("sparse");
    sparse(
        &[b"GNU.sparse.map=4,4,0,4", b"GNU.sparse.size=99"],
        b"headtail",
    )
    .refused("sparse");
    sparse(&[b"GNU.sparse.map=0,9", b"GNU.sparse.size=5"], b"headtail!").refused("sparse");
    sparse(
        &[
            b"GNU.sparse.major=2",
            b"GNU.sparse.minor=0",
            b"GNU.sparse.realsize=5",
        ],
        b"",
    )
    .refused("unknown version");
    // Zeroes in a plain file become a hole, too.
    let mut zeros = vec![0; 1 << 20];
    zeros[500_000] = 1;
    let (dir, _) = Layer::default().file("z", &zeros).unpack().unwrap();
    assert!(fs::read(root(&dir).join("z")).unwrap() == zeros);
    assert!(fs::metadata(root(&dir).join("z")).unwrap().blocks() * 512 < 64 << 10);
}

#[test]
fn another_writer_of_archives_is_understood() {
    let mut builder = Builder::new(Vec::new());
    let long = format!("{}/file", "directory".repeat(20));
    let mut header = Header::new_gnu();
    header.set_size(4);
    header.set_mode(0o640);
    builder
        .append_data(&mut header, &long, &b"data"[..])
        .unwrap();
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::Symlink);
    header.set_size(0);
    builder.append_link(&mut header, "link", &long).unwrap();
    let bytes = builder.into_inner().unwrap();
    let (dir, unpacked) = unpack_bytes(&bytes, Compression::None, LIMITS).unwrap();
    assert_eq!(unpacked.entries, 3, "the directory is counted");
    assert_eq!(fs::read(root(&dir).join("link")).unwrap(), b"data");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever names and kinds come in which order: it unpacks or is refused, and stays inside.
    #[test]
    fn any_layer_stays_inside(entries in prop::collection::vec((0..6_u8, "[ab./]{1,8}", "[ab./]{0,6}"), 0..20)) {
        let kinds = [b'0', b'1', b'2', b'5', b'6', b'0'];
        let mut layer = Layer::default();
        for (kind, name, link) in &entries {
            let name = if *kind == 5 { format!("{name}/.wh.a") } else { name.clone() };
            layer = layer.raw(kinds[usize::from(*kind)], &name, link, b"", |_| {});
        }
        // What matters is checked around it.
        let _ = layer.unpack();
    }

    /// Any change of any byte is an error or unpacks; it never panics and never leaves the root.
    #[test]
    fn damaged_archives_are_refused_or_unpacked(at in 0..4096_usize, value: u8) {
        let layer = Layer::default().dir("d").pax(&[b"path=d/x", b"mtime=1.5"]).file("s", b"data").link("l", "d");
        let mut bytes = layer.end();
        let at = at % bytes.len();
        bytes[at] = value;
        let _ = unpack_bytes(&bytes, Compression::None, LIMITS);
    }
}
