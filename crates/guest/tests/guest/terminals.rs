//! Pseudo-terminals: attach, input, resize, foreground process group, end.

use crate::support::{Guest, argv, marker, processes_with, wait_for_processes, with_guest};
use bytes::Bytes;
use k8e_wire::HostEnd;
use k8e_wire::proto::{
    self, AttachTerminal, CreateTerminal, EndTerminal, EnvVar, ErrorCode, Exec, Exited,
    InspectTerminal, ListTerminals, ResizeTerminal, Script, SignalTerminal, TerminalState, Waiting,
    WriteTerminal, exec::Program, reply::Reply, request::Call,
};
use std::time::{Duration, Instant};

/// A terminal of a test.
struct Terminal<'a> {
    guest: &'a Guest,
    id: String,
    pid: i32,
}

/// An attached reader.
struct Reader {
    end: HostEnd,
    said: Vec<u8>,
    exited: Option<Exited>,
}

async fn create<'a>(guest: &'a Guest, id: &str, exec: Exec) -> Result<Terminal<'a>, proto::Error> {
    let request = CreateTerminal {
        id: id.to_owned(),
        exec: Some(exec),
        rows: 33,
        cols: 101,
        awaits_reader: false,
    };
    match guest.one(Call::CreateTerminal(request)).await? {
        Reply::Started(started) => Ok(Terminal {
            guest,
            id: id.to_owned(),
            pid: started.pid,
        }),
        other => panic!("{other:?}"),
    }
}

/// An interactive shell with a fixed prompt and no startup files.
async fn shell<'a>(guest: &'a Guest, id: &str) -> Terminal<'a> {
    let exec = argv(&["bash", "--norc", "--noprofile", "-i"]);
    let exec = Exec {
        env: vec![EnvVar {
            name: Bytes::from_static(b"PS1"),
            value: Bytes::from_static(b"ready> "),
        }],
        ..exec
    };
    create(guest, id, exec).await.unwrap()
}

impl Terminal<'_> {
    async fn attach(&self) -> Reader {
        let id = self.id.clone();
        let call = Call::AttachTerminal(AttachTerminal { id });
        let mut end = self.guest.call(call).await;
        match end.replies.next().await.unwrap() {
            Reply::Started(started) => assert_eq!(started.pid, self.pid),
            other => panic!("{other:?}"),
        }
        Reader {
            end,
            said: Vec::new(),
            exited: None,
        }
    }

    async fn write(&self, data: &[u8]) -> u64 {
        let request = WriteTerminal {
            id: self.id.clone(),
            data: Bytes::copy_from_slice(data),
        };
        match self.guest.one(Call::WriteTerminal(request)).await.unwrap() {
            Reply::Done(done) => done.bytes,
            other => panic!("{other:?}"),
        }
    }

    async fn state(&self, call: Call) -> Result<TerminalState, proto::Error> {
        match self.guest.one(call).await? {
            Reply::Terminal(state) => Ok(state),
            other => panic!("{other:?}"),
        }
    }

    async fn inspect(&self) -> TerminalState {
        let id = self.id.clone();
        self.state(Call::InspectTerminal(InspectTerminal { id }))
            .await
            .unwrap()
    }

    async fn signal(&self, signal: i32) -> Result<TerminalState, proto::Error> {
        let id = self.id.clone();
        self.state(Call::SignalTerminal(SignalTerminal { id, signal }))
            .await
    }

    async fn resize(&self, rows: u32, cols: u32) {
        let id = self.id.clone();
        let request = ResizeTerminal { id, rows, cols };
        let done = self.guest.one(Call::ResizeTerminal(request)).await;
        assert!(matches!(done, Ok(Reply::Done(_))), "{done:?}");
    }

    async fn end(&self, grace_ms: u64) {
        let id = self.id.clone();
        let request = EndTerminal { id, grace_ms };
        let done = self.guest.one(Call::EndTerminal(request)).await;
        assert!(matches!(done, Ok(Reply::Done(_))), "{done:?}");
    }

    /// Waits until its state is as wanted.
    async fn until(&self, wanted: impl Fn(&TerminalState) -> bool) -> TerminalState {
        loop {
            let state = self.inspect().await;
            if wanted(&state) {
                return state;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until that program is in the foreground. The shell's child is there before it has
    /// executed the program, and a signal to it then is lost.
    async fn until_runs(&self, program: &str) -> TerminalState {
        let name = |group: i32| std::fs::read_to_string(format!("/proc/{group}/comm"));
        self.until(|state| name(state.foreground).is_ok_and(|name| name.trim() == program))
            .await
    }
}

impl Reader {
    /// Reads until that output; removes everything up to its end.
    async fn until(&mut self, text: &str) -> String {
        // Searches only new output: a slow reader would be cut off.
        let mut searched = 0;
        loop {
            let at = self.said[searched..]
                .windows(text.len())
                .position(|part| part == text.as_bytes());
            if let Some(at) = at {
                let said = self.said.drain(..searched + at + text.len()).collect();
                return String::from_utf8(said).unwrap();
            }
            searched = self.said.len().saturating_sub(text.len());
            assert!(
                self.next().await,
                "{text:?} is not in {:?}",
                String::from_utf8_lossy(&self.said)
            );
        }
    }

    /// False at end of file.
    async fn next(&mut self) -> bool {
        match self.end.replies.next().await.unwrap() {
            Reply::Data(data) => self.said.extend_from_slice(&data),
            Reply::Exited(exited) => {
                self.exited = Some(exited);
                return false;
            }
            other => panic!("{other:?}"),
        }
        true
    }

    async fn exited(&mut self) -> (i32, i32) {
        while self.next().await {}
        let exited = self.exited.unwrap();
        (exited.exit_code, exited.signal)
    }
}

#[test]
fn a_shell_at_a_terminal() {
    with_guest(async |guest| {
        let terminal = shell(&guest, "t").await;
        let mut reader = terminal.attach().await;
        reader.until("ready> ").await;
        terminal
            .write(b"tty; stty size; echo $TERM; test -t 0 -a -t 1 -a -t 2 && echo all\n")
            .await;
        reader.until("/dev/pts/").await;
        reader.until("33 101\r\nxterm-256color\r\nall\r\n").await;
        reader.until("ready> ").await;
        terminal.resize(40, 132).await;
        terminal.write(b"stty size\n").await;
        reader.until("40 132\r\n").await;
        let state = terminal.inspect().await;
        assert_eq!((state.rows, state.cols), (40, 132));
        // Input and output are bytes, not text.
        terminal
            .write("printf '\\377\\001x%s\\n' 'ü'\n".as_bytes())
            .await;
        while !reader
            .said
            .windows(5)
            .any(|part| part == b"\xff\x01x\xc3\xbc")
        {
            assert!(reader.next().await);
        }
        terminal.write(b"exit 7\n").await;
        assert_eq!(reader.exited().await, (7, 0));
        // A late reader gets the end of the output, and the exit status.
        let mut late = terminal.attach().await;
        assert_eq!(late.exited().await, (7, 0));
        assert!(late.said.ends_with(b"exit\r\n"), "{:?}", late.said);
        assert_eq!(late.said.first(), Some(&0x1b), "from the first prompt on");
        assert_eq!(terminal.write(b"x").await, 0);
        assert!(terminal.inspect().await.exited.is_some());
    });
}

#[test]
fn exit_codes_and_signals_are_exact() {
    with_guest(async |guest| {
        for (n, (code, want)) in [
            ("exit 0", (0, 0)),
            ("exit 3", (3, 0)),
            ("kill -9 $$", (137, 9)),
            ("kill -TERM $$", (143, 15)),
            ("printf x; exit 255", (255, 0)),
        ]
        .into_iter()
        .enumerate()
        {
            let exec = argv(&["sh", "-c", code]);
            let terminal = create(&guest, &format!("t{n}"), exec).await.unwrap();
            assert_eq!(terminal.attach().await.exited().await, want, "{code}");
        }
    });
}

#[test]
fn the_foreground_is_known_and_gets_signals() {
    with_guest(async |guest| {
        let terminal = shell(&guest, "t").await;
        let mut reader = terminal.attach().await;
        reader.until("ready> ").await;
        let state = terminal
            .until(|state| state.input_waiting() == Waiting::Yes)
            .await;
        assert_eq!(state.foreground, terminal.pid);
        terminal.write(b"sleep 60; echo interrupted\n").await;
        let state = terminal.until_runs("sleep").await;
        assert!(state.foreground > 1);
        assert_eq!(terminal.inspect().await.input_waiting(), Waiting::No);
        let signalled = terminal.signal(libc::SIGINT).await.unwrap();
        assert_eq!(signalled.foreground, state.foreground);
        reader.until("ready> ").await;
        // As a character in the input it has the same effect.
        terminal.write(b"sleep 60\n").await;
        terminal.until_runs("sleep").await;
        terminal.write(b"\x03").await;
        reader.until("^C").await;
        reader.until("ready> ").await;
        terminal.write(b"cat\n").await;
        terminal
            .until(|state| {
                state.foreground != terminal.pid && state.input_waiting() == Waiting::Yes
            })
            .await;
        terminal.write(b"\x1a").await;
        reader.until("Stopped").await;
        let wrong = terminal.signal(65).await.unwrap_err();
        assert_eq!(wrong.code(), ErrorCode::Invalid);
        terminal.end(500).await;
    });
}

#[test]
fn ending_asks_and_then_kills_all_it_started() {
    with_guest(async |guest| {
        let (stubborn, polite) = (marker(), marker());
        let code = format!(
            "trap '' TERM HUP; setsid sh -c \"trap '' TERM HUP; sleep {stubborn}; :\" & \
             sleep {polite} & echo up; while :; do sleep {stubborn}; done"
        );
        let terminal = create(&guest, "t", argv(&["sh", "-c", &code]))
            .await
            .unwrap();
        let mut reader = terminal.attach().await;
        reader.until("up").await;
        wait_for_processes(&stubborn, 2).await;
        let begun = Instant::now();
        terminal.end(300).await;
        let took = begun.elapsed();
        assert!(took >= Duration::from_millis(300) && took < Duration::from_secs(5));
        assert_eq!(
            (processes_with(&stubborn), processes_with(&polite)),
            (vec![], vec![])
        );
        assert_eq!(reader.exited().await, (137, 9));
        let id = terminal.id.clone();
        let gone = guest
            .one(Call::InspectTerminal(InspectTerminal { id }))
            .await;
        assert_eq!(gone.unwrap_err().code(), ErrorCode::NotFound);

        // A shell that exits on SIGHUP ends before the grace period does.
        let terminal = shell(&guest, "u").await;
        let mut reader = terminal.attach().await;
        reader.until("ready> ").await;
        let begun = Instant::now();
        terminal.end(10_000).await;
        assert!(begun.elapsed() < Duration::from_secs(4));
        reader.exited().await;
        // A program that handles SIGTERM exits with its own status.
        let exec = argv(&[
            "bash",
            "-c",
            "trap 'exit 5' TERM; echo up; while :; do sleep 0.02; done",
        ]);
        let terminal = create(&guest, "v", exec).await.unwrap();
        let mut reader = terminal.attach().await;
        reader.until("up").await;
        terminal.end(10_000).await;
        assert_eq!(reader.exited().await, (5, 0));
    });
}

#[test]
fn late_readers_get_the_end_of_the_output() {
    with_guest(async |guest| {
        let exec = argv(&["sh", "-c", "seq 1 40000; echo over; sleep 60"]);
        let terminal = create(&guest, "t", exec).await.unwrap();
        let mut first = terminal.attach().await;
        first.until("over\r\n").await;
        drop(first);
        let (mut one, mut two) = (terminal.attach().await, terminal.attach().await);
        let said = [one.until("over\r\n").await, two.until("over\r\n").await];
        assert_eq!(said[0], said[1]);
        assert_eq!(said[0].len(), 64 * 1024);
        assert!(said[0].ends_with("39999\r\n40000\r\nover\r\n"));
        terminal.end(0).await;
    });
}

#[test]
fn readers_miss_nothing_and_stalled_ones_are_cut_off() {
    with_guest(async |guest| {
        let go = argv(&["sh", "-c", "read go; seq 1 300000; echo over"]);
        let terminal = create(&guest, "t", go).await.unwrap();
        let (mut one, mut two) = (terminal.attach().await, terminal.attach().await);
        let mut lazy = terminal.attach().await;
        terminal.write(b"go\n").await;
        let want: String = (1..=300_000).map(|n| format!("{n}\r\n")).collect();
        let (first, second) = tokio::join!(one.until("over\r\n"), two.until("over\r\n"));
        for said in [first, second] {
            assert!(said.ends_with(&format!("{want}over\r\n")), "{}", said.len());
        }
        let cut = loop {
            match lazy.end.replies.next().await {
                Ok(Reply::Data(_)) => {}
                Ok(Reply::Error(error)) => break error,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(cut.code(), ErrorCode::Exhausted);
    });
}

#[test]
fn with_no_reader_nothing_waits() {
    with_guest(async |guest| {
        let exec = argv(&["sh", "-c", "seq 1 200000; exit 4"]);
        let terminal = create(&guest, "t", exec).await.unwrap();
        terminal.until(|state| state.exited.is_some()).await;
        assert_eq!(terminal.attach().await.exited().await, (4, 0));
    });
}

#[test]
fn there_are_so_many_and_those_that_are_over_make_room() {
    with_guest(async |guest| {
        for n in 0..64 {
            let exec = argv(&["sleep", "60"]);
            create(&guest, &format!("t{n}"), exec).await.unwrap();
        }
        let more = create(&guest, "more", argv(&["true"])).await.err().unwrap();
        assert_eq!(more.code(), ErrorCode::Exhausted);
        let first = Terminal {
            guest: &guest,
            id: "t0".to_owned(),
            pid: 0,
        };
        first.signal(libc::SIGKILL).await.unwrap();
        first.until(|state| state.exited.is_some()).await;
        create(&guest, "more", argv(&["sleep", "60"]))
            .await
            .unwrap();
        let Reply::Terminals(list) = guest
            .one(Call::ListTerminals(ListTerminals {}))
            .await
            .unwrap()
        else {
            panic!()
        };
        assert_eq!(list.terminals.len(), 64);
        assert!(list.terminals.iter().all(|terminal| terminal.id != "t0"));
    });
}

#[test]
fn what_cannot_be_is_refused_and_leaves_nothing() {
    with_guest(async |guest| {
        let code = async |id: &str, exec: Exec| {
            let refused = create(&guest, id, exec).await;
            refused.err().unwrap().code()
        };
        assert_eq!(
            code("t", argv(&["no-such-program"])).await,
            ErrorCode::NoProgram
        );
        assert_eq!(code("t", argv(&[])).await, ErrorCode::Invalid);
        let script = Exec {
            program: Some(Program::Script(Script::default())),
            ..argv(&[])
        };
        assert_eq!(code("t", script).await, ErrorCode::Invalid);
        assert_eq!(code("", argv(&["true"])).await, ErrorCode::Invalid);
        let request = CreateTerminal {
            id: "t".to_owned(),
            exec: Some(argv(&["true"])),
            rows: 70_000,
            cols: 1,
            awaits_reader: false,
        };
        let refused = guest.one(Call::CreateTerminal(request)).await;
        assert_eq!(refused.unwrap_err().code(), ErrorCode::Invalid);
        // The id can be used again.
        let terminal = create(&guest, "t", argv(&["sleep", "60"])).await.unwrap();
        assert_eq!(code("t", argv(&["true"])).await, ErrorCode::Exists);
        terminal.end(0).await;
    });
}
