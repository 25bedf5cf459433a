//! File and process calls with a correct guest. It is scripted, because the real
//! one works below `/workspace`, which tests must not write to on the host.

use super::*;
use bytes::Bytes;
use k8e_engine::{FileKind, FileRange, ListOptions, WriteOptions};
use k8e_model::GuestPath;
use k8e_testkit::{Script, Step};
use k8e_wire::proto::{self, Done, FileType, reply, request};

fn info(path: &str, kind: FileType) -> proto::FileInfo {
    proto::FileInfo {
        path: Bytes::copy_from_slice(path.as_bytes()),
        r#type: kind.into(),
        size: 6,
        mode: 0o100_644,
        ..proto::FileInfo::default()
    }
}

fn answers(call: &request::Call) -> Option<Vec<Step>> {
    let done = |bytes, truncated| reply::Reply::Done(Done { bytes, truncated });
    let file = || info("/workspace/dir/f", FileType::File);
    let replies = match call {
        request::Call::ReadFile(asked) => {
            assert_eq!(
                (&asked.root[..], &asked.path[..]),
                (&b"/workspace"[..], &b"dir/f"[..])
            );
            let data = |bytes: &'static [u8]| reply::Reply::Data(Bytes::from_static(bytes));
            vec![
                reply::Reply::File(file()),
                data(b"one"),
                data(b""),
                data(b"\xff\0x"),
                done(0, false),
            ]
        }
        request::Call::ListFiles(asked) => {
            assert!(asked.recursive && asked.entries_max > 0);
            let list = |files| reply::Reply::Files(proto::FileList { files });
            vec![
                list(vec![info("/workspace", FileType::Directory)]),
                list(vec![file(), file()]),
                done(0, true),
            ]
        }
        request::Call::Stat(_) => vec![reply::Reply::File(file())],
        request::Call::MakeDir(_) | request::Call::Move(_) | request::Call::Remove(_) => {
            vec![done(0, false)]
        }
        request::Call::ListProcesses(_) => {
            let process = proto::Process {
                pid: 1,
                state: "S\n".to_owned(),
                ..proto::Process::default()
            };
            vec![
                reply::Reply::Processes(proto::ProcessList {
                    processes: vec![process],
                }),
                done(0, false),
            ]
        }
        _ => return None,
    };
    Some(replies.into_iter().map(Step::Reply).collect())
}

#[tokio::test]
async fn calls_return_what_the_guest_replies() {
    let script: Script = Arc::new(answers);
    let server = Server::with(Config::default(), FakeDriver::scripted(script)).await;
    server.create("a").await;
    let (sessions, who, id) = (&server.sessions, &me(), &sid("a"));
    let path = GuestPath::parse(b"/workspace/dir/f").unwrap();

    let mut reader = sessions
        .read_file(
            who,
            id,
            &path,
            FileRange {
                offset: 0,
                length: 6,
            },
        )
        .await
        .unwrap();
    assert_eq!(
        (reader.info.kind, reader.info.mode),
        (FileKind::File, 0o644)
    );
    let mut content = Vec::new();
    while let Some(data) = reader.next().await.unwrap() {
        content.extend_from_slice(&data);
    }
    assert_eq!(content, b"one\xff\0x");
    assert!(reader.next().await.unwrap().is_none());

    let options = ListOptions {
        recursive: true,
        since_unix_s: 0,
        depth: 0,
    };
    let mut lister = sessions.list_files(who, id, &path, options).await.unwrap();
    let mut listed = 0;
    while let Some(files) = lister.next().await.unwrap() {
        listed += files.len();
    }
    assert_eq!((listed, lister.truncated()), (3, true));

    assert_eq!(
        sessions.stat(who, id, &path).await.unwrap().path,
        "/workspace/dir/f"
    );
    sessions.make_dir(who, id, &path, true, 0).await.unwrap();
    sessions.move_file(who, id, &path, &path).await.unwrap();
    sessions.remove_file(who, id, &path, true).await.unwrap();
    let processes = sessions.processes(who, id).await.unwrap();
    assert_eq!(
        (processes.len(), processes[0].pid, processes[0].state),
        (1, 1, 'S')
    );
}

/// A write ends with the guest's reply, which has the number of bytes written.
#[tokio::test]
async fn a_write_ends_with_what_was_written() {
    let script: Script = Arc::new(|call: &request::Call| match call {
        request::Call::WriteFile(asked) => {
            assert_eq!((asked.append, asked.mode), (true, 0o755));
            let done = reply::Reply::Done(Done {
                bytes: 300_000,
                truncated: false,
            });
            Some(vec![Step::TakeInput, Step::Reply(done)])
        }
        _ => None,
    });
    let server = Server::with(Config::default(), FakeDriver::scripted(script)).await;
    server.create("a").await;
    let path = GuestPath::parse(b"f").unwrap();
    let options = WriteOptions {
        append: true,
        mode: 0o100_755,
        owner: None,
    };
    let mut writer = server
        .sessions
        .write_file(&me(), &sid("a"), &path, options)
        .await
        .unwrap();
    for _ in 0..3 {
        writer.write(Bytes::from(vec![7; 100_000])).await.unwrap();
    }
    assert_eq!(writer.finish().await.unwrap(), 300_000);
}
