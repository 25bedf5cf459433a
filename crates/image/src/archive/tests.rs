//! Layouts and archives that are whole, and those that are not.

use super::*;
use std::fs;
use tar::{Builder, EntryType, Header};

fn config() -> Vec<u8> {
    let arch = crate::manifest::go_architecture();
    let id = digest_of(b"layer");
    json!({ "os": "linux", "architecture": arch, "rootfs": { "type": "layers", "diff_ids": [id.as_str()] } })
        .to_string()
        .into_bytes()
}

/// Names and contents of the files of a layout with one image.
fn layout_files(tag: Option<&str>) -> Vec<(String, Vec<u8>)> {
    let blob = |bytes: &[u8]| (blob_name(&digest_of(bytes)), bytes.to_vec());
    let config = config();
    let manifest = json!({
        "schemaVersion": 2,
        "config": { "mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest_of(&config).as_str(), "size": config.len() },
        "layers": [{ "mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": digest_of(b"layer").as_str(), "size": 5 }],
    })
    .to_string()
    .into_bytes();
    let mut entry = json!({ "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest_of(&manifest).as_str(), "size": manifest.len() });
    if let Some(tag) = tag {
        entry["annotations"] = json!({ REF_NAME: tag });
    }
    let index = json!({ "schemaVersion": 2, "manifests": [entry] });
    vec![
        ("index.json".to_owned(), index.to_string().into_bytes()),
        blob(&config),
        blob(b"layer"),
        blob(&manifest),
    ]
}

fn archive(files: &[(String, Vec<u8>)], links: &[(&str, &str)]) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut builder = Builder::new(file.reopen().unwrap());
    for (name, data) in files {
        let mut header = Header::new_gnu();
        header.set_size(data.len() as u64);
        builder.append_data(&mut header, name, &data[..]).unwrap();
    }
    for (name, target) in links {
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Symlink);
        header.set_size(0);
        builder.append_link(&mut header, name, target).unwrap();
    }
    builder.finish().unwrap();
    file
}

#[track_caller]
fn is_whole(image: &LocalImage) {
    let manifest = Manifest::parse(&image.manifest).unwrap();
    manifest.image(&image.config).unwrap();
    let mut layer = Vec::new();
    image
        .layer(&manifest.layers[0].blob.digest)
        .unwrap()
        .read_to_end(&mut layer)
        .unwrap();
    assert_eq!(layer, b"layer");
    assert!(image.layer(&digest_of(b"another")).is_err());
}

#[test]
fn layouts_are_read_from_directories_and_archives() {
    for tag in [None, Some("latest")] {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("blobs/sha256")).unwrap();
        for (name, data) in layout_files(tag) {
            fs::write(dir.path().join(name), data).unwrap();
        }
        let shown = dir.path().display();
        is_whole(&LocalImage::open(&format!("oci:{shown}").parse().unwrap()).unwrap());
        let named = LocalImage::open(&format!("oci:{shown}:latest").parse().unwrap());
        assert_eq!(named.is_ok(), tag.is_some());
        let file = archive(&layout_files(tag), &[]);
        let source = format!("oci-archive:{}", file.path().display());
        is_whole(&LocalImage::open(&source.parse().unwrap()).unwrap());
        let plain = fs::read(file.path()).unwrap();
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        std::io::Write::write_all(&mut gzip, &plain).unwrap();
        let level = ruzstd::encoding::CompressionLevel::Fastest;
        for packed in [
            gzip.finish().unwrap(),
            ruzstd::encoding::compress_to_vec(&plain[..], level),
        ] {
            fs::write(file.path(), &packed).unwrap();
            is_whole(&LocalImage::open(&source.parse().unwrap()).unwrap());
            fs::write(file.path(), &packed[..packed.len() / 2]).unwrap();
            assert!(LocalImage::open(&source.parse().unwrap()).is_err(), "cut");
        }
    }
}

#[test]
fn what_docker_saves_is_read() {
    let config = config();
    let saved = json!([{ "Config": "c.json", "RepoTags": ["a:b"], "Layers": ["one/layer.tar"] }]);
    let files = vec![
        ("manifest.json".to_owned(), saved.to_string().into_bytes()),
        ("c.json".to_owned(), config),
        ("two/layer.tar".to_owned(), b"layer".to_vec()),
    ];
    let file = archive(&files, &[("one/layer.tar", "../two/layer.tar")]);
    let source: Source = format!("docker-archive:{}", file.path().display())
        .parse()
        .unwrap();
    is_whole(&LocalImage::open(&source).unwrap());
    let file = archive(&files, &[("one/layer.tar", "../one/layer.tar")]);
    let source: Source = format!("docker-archive:{}", file.path().display())
        .parse()
        .unwrap();
    assert!(LocalImage::open(&source).is_err(), "a link to itself");
}

#[test]
fn what_is_wrong_is_said() {
    let open = |source: &str| {
        LocalImage::open(&source.parse().unwrap())
            .unwrap_err()
            .to_string()
    };
    assert!(open("oci:/nowhere").contains("index.json"));
    assert!(open("oci-archive:/nowhere").contains("/nowhere"));
    let file = archive(&[], &[]);
    assert!(open(&format!("docker-archive:{}", file.path().display())).contains("manifest.json"));
    let mut tampered = layout_files(None);
    tampered[1].1.push(b' ');
    let file = archive(&tampered, &[]);
    assert!(open(&format!("oci-archive:{}", file.path().display())).contains("digest"));
    assert!("oci-archive:".parse::<Source>().is_err());
    assert!("nothing like it!".parse::<Source>().is_err());
}
