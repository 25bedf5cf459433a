//! Headers of tar archives.

use super::*;

#[test]
fn numbers_are_octal_or_binary() {
    assert_eq!(number(b"0000644\0", "mode").unwrap(), 0o644);
    assert_eq!(number(b" 644 \0\0\0", "mode").unwrap(), 0o644);
    assert_eq!(number(b"\0\0\0\0\0\0\0\0", "mode").unwrap(), 0);
    assert_eq!(number(b"\x80\0\0\0\0\0\x01\0", "size").unwrap(), 256);
    for bad in [
        &b"9999999\0"[..],
        b"12x4567\0",
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        b"-000001\0",
    ] {
        assert!(number(bad, "size").is_err(), "{bad:?}");
    }
    assert_eq!(
        time(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff").unwrap(),
        -1
    );
}

#[test]
fn an_empty_archive_has_no_entries() {
    assert_eq!(Archive::new(&[0_u8; 1024][..]).next().unwrap(), None);
    assert_eq!(Archive::new(&[][..]).next().unwrap(), None);
    assert!(Archive::new(&[1_u8; 100][..]).next().is_err());
    assert!(Archive::new(&[1_u8; 512][..]).next().is_err());
}
