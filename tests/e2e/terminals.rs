//! Terminals, on both runtimes, and the command that opens one.

use k8e_api::client::{Client, Endpoint};
use k8e_api::v1::{self, terminal_event::Event};
use k8e_e2e::{Server, Session};
use std::time::{Duration, Instant};

/// Nothing here takes longer, on a machine that runs other tests as well.
const SOON: Duration = Duration::from_secs(60);

/// A terminal and somebody who uses it.
struct Terminal {
    client: Client,
    id: String,
    pid: i32,
}

/// Somebody who reads one.
struct Reader {
    events: tonic::Streaming<v1::TerminalEvent>,
    said: Vec<u8>,
    exited: Option<v1::TerminalExited>,
}

fn block_on<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let within = async { tokio::time::timeout(SOON, work).await };
    runtime.block_on(within).expect("the test hangs")
}

async fn client(server: &Server) -> Client {
    Client::connect(&Endpoint::Unix(server.socket()))
        .await
        .unwrap()
}

impl Terminal {
    async fn create(client: &Client, session: &str, argv: &[&str]) -> Self {
        let mut client = client.clone();
        let request = v1::CreateTerminalRequest {
            session_id: session.to_owned(),
            argv: argv.iter().map(|arg| arg.to_string().into()).collect(),
            rows: 33,
            cols: 101,
            env: [("PS1".to_owned(), "ready> ".to_owned())].into(),
            ..Default::default()
        };
        let made = client.create_terminal(request).await.unwrap().into_inner();
        assert!(made.terminal_id.starts_with("term-"), "{made:?}");
        Self {
            client,
            id: made.terminal_id,
            pid: made.pid,
        }
    }

    /// A shell that has said that it is ready.
    async fn shell(client: &Client, session: &str) -> (Self, Reader) {
        let argv = ["bash", "--norc", "--noprofile", "--noediting", "-i"];
        let mut terminal = Self::create(client, session, &argv).await;
        let mut reader = terminal.attach().await;
        reader.until("ready> ").await;
        (terminal, reader)
    }

    async fn attach(&mut self) -> Reader {
        let terminal_id = self.id.clone();
        let request = v1::AttachTerminalRequest { terminal_id };
        let events = self.client.attach_terminal(request).await.unwrap();
        Reader {
            events: events.into_inner(),
            said: Vec::new(),
            exited: None,
        }
    }

    async fn write(&mut self, data: &[u8]) {
        let request = v1::WriteTerminalRequest {
            terminal_id: self.id.clone(),
            data: data.to_vec().into(),
        };
        self.client.write_terminal(request).await.unwrap();
    }

    async fn resize(&mut self, rows: u32, cols: u32) {
        let terminal_id = self.id.clone();
        let request = v1::ResizeTerminalRequest {
            terminal_id,
            rows,
            cols,
        };
        self.client.resize_terminal(request).await.unwrap();
    }

    async fn foreground(&mut self) -> v1::TerminalForegroundResponse {
        let terminal_id = self.id.clone();
        let request = v1::TerminalForegroundRequest { terminal_id };
        let answer = self.client.terminal_foreground(request).await;
        answer.unwrap().into_inner()
    }

    /// Waits until somebody else than the shell, or the shell, is in the foreground.
    async fn until_foreground(&mut self, shell: bool) -> i32 {
        loop {
            let group = self.foreground().await.process_group_id;
            if group > 1 && (group == self.pid) == shell {
                return group;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until that program is in the foreground. The shell's child is there before it has
    /// become the program, and what interrupts it then is forgotten.
    async fn until_runs(&mut self, session: &Session<'_>, program: &str) -> i32 {
        loop {
            let group = self.until_foreground(false).await;
            if session.sh(&format!("cat /proc/{group}/comm")).out().trim() == program {
                return group;
            }
        }
    }

    async fn signal(&mut self, signal: i32) -> i32 {
        let terminal_id = self.id.clone();
        let request = v1::SignalTerminalRequest {
            terminal_id,
            signal,
        };
        let answer = self.client.signal_terminal(request).await.unwrap();
        answer.into_inner().process_group_id
    }

    async fn destroy(&mut self, grace_ms: i64) {
        let terminal_id = self.id.clone();
        let request = v1::DestroyTerminalRequest {
            terminal_id,
            grace_ms,
        };
        self.client.destroy_terminal(request).await.unwrap();
    }
}

impl Reader {
    async fn next(&mut self) -> bool {
        let event = self.events.message().await.unwrap().unwrap();
        match event.event.unwrap() {
            Event::Data(data) => self.said.extend_from_slice(&data),
            Event::Exited(exited) => {
                self.exited = Some(exited);
                return false;
            }
        }
        true
    }

    /// Reads until it said that; what was said up to it is returned and taken away.
    async fn until(&mut self, text: &str) -> Vec<u8> {
        loop {
            let mut parts = self.said.windows(text.len());
            if let Some(at) = parts.position(|part| part == text.as_bytes()) {
                return self.said.drain(..at + text.len()).collect();
            }
            let more = self.next().await;
            let said = String::from_utf8_lossy(&self.said);
            assert!(more, "{text:?} is not in {said:?}");
        }
    }

    async fn exited(&mut self) -> (i32, i32) {
        while self.next().await {}
        let exited = self.exited.unwrap();
        (exited.exit_code, exited.signal)
    }
}

fn a_terminal_is_a_terminal(runtime: &str) {
    let server = Server::start_with(&["--default-runtime", runtime]);
    let session = server.session_with(&["--env", "OF=session"]);
    block_on(async {
        let client = client(&server).await;
        let (mut terminal, mut reader) = Terminal::shell(&client, &session.id).await;
        // Its size, and that it changes; the session's environment is under its own.
        terminal
            .write(b"tty; pwd; stty size; echo $OF $TERM; trap 'echo winched' WINCH\n")
            .await;
        let said = reader.until("session xterm-256color\r\n").await;
        let said = String::from_utf8(said).unwrap();
        assert!(said.contains("/dev/pts/"), "{said}");
        assert!(said.contains("/workspace\r\n33 101\r\n"), "{said}");
        reader.until("ready> ").await;
        terminal.resize(40, 132).await;
        terminal.write(b"stty size\n").await;
        let said = reader.until("40 132\r\n").await;
        let winched = said.windows(7).any(|part| part == b"winched");
        if !winched {
            reader.until("winched").await;
        }
        reader.until("ready> ").await;
        // Bytes.
        terminal
            .write(b"printf '\\377\\000\\001\\200end\\n'\n")
            .await;
        reader.until("end\\n'\r\n").await;
        let said = reader.until("end\r\n").await;
        assert!(said.ends_with(b"\xff\0\x01\x80end\r\n"), "{said:?}");
        // Somebody in the foreground, a signal for it, and one that is typed.
        assert_eq!(terminal.until_foreground(true).await, terminal.pid);
        terminal.write(b"sleep 61.5\n").await;
        let group = terminal.until_runs(&session, "sleep").await;
        assert_eq!(terminal.signal(2).await, group);
        terminal.until_foreground(true).await;
        terminal.write(b"sleep 61.5\n").await;
        terminal.until_runs(&session, "sleep").await;
        terminal.write(b"\x03").await;
        terminal.until_foreground(true).await;
        terminal.write(b"echo calm a''gain\n").await;
        reader.until("calm again\r\n").await;
        reader.until("ready> ").await;
        // Two read, one leaves, comes again, and has missed nothing.
        let mut second = terminal.attach().await;
        terminal.write(b"seq 1 30000; echo all-$((6 * 7))\n").await;
        let first = reader.until("all-42\r\n").await;
        let both = second.until("all-42\r\n").await;
        let tail = |said: &[u8]| {
            let text = String::from_utf8_lossy(said);
            assert!(said.len() > 60_000, "it was cut short: {text:?}");
            said[said.len() - 60_000..].to_vec()
        };
        assert!(tail(&first) == tail(&both));
        drop(second);
        let mut again = terminal.attach().await;
        let replay = again.until("all-42\r\n").await;
        assert!(replay.len() > 60_000 && replay.len() <= 64 * 1024);
        assert!(tail(&replay) == tail(&first));
        // Its end.
        terminal.write(b"exit 7\n").await;
        assert_eq!(reader.exited().await, (7, 0));
        assert_eq!(again.exited().await, (7, 0));
        assert_eq!(terminal.attach().await.exited().await, (7, 0));
        let mut killed = Terminal::create(&client, &session.id, &["sleep", "61.5"]).await;
        killed.signal(9).await;
        assert_eq!(killed.attach().await.exited().await, (137, 9));
        let request = v1::CreateTerminalRequest {
            session_id: session.id.clone(),
            argv: vec!["no-such-program".into()],
            ..Default::default()
        };
        let missing = client.clone().create_terminal(request).await.unwrap_err();
        assert_eq!(missing.code(), tonic::Code::InvalidArgument, "{missing}");
    });
}

#[test]
fn a_terminal_is_a_terminal_native() {
    a_terminal_is_a_terminal("native");
}

#[test]
fn a_terminal_is_a_terminal_gvisor() {
    a_terminal_is_a_terminal("gvisor");
}

fn destroying_leaves_nothing(runtime: &str) {
    let server = Server::start_with(&["--default-runtime", runtime]);
    let session = server.session();
    block_on(async {
        let client = client(&server).await;
        let script = "trap '' TERM HUP; setsid sh -c \"trap '' TERM HUP; sleep 62.5; :\" & \
                      echo up; while :; do sleep 62.5; done";
        let mut terminal = Terminal::create(&client, &session.id, &["sh", "-c", script]).await;
        let mut reader = terminal.attach().await;
        reader.until("up").await;
        let count = || session.sh("pgrep -fxc 'sleep 62[.]5'").out();
        while count() != "2\n" {}
        terminal.destroy(300).await;
        assert_eq!(count(), "0\n");
        assert_eq!(reader.exited().await, (137, 9));
        let request = v1::AttachTerminalRequest {
            terminal_id: terminal.id.clone(),
        };
        let gone = client.clone().attach_terminal(request).await;
        assert_eq!(gone.unwrap_err().code(), tonic::Code::NotFound);
        // A shell goes when it is asked.
        let (mut shell, _reader) = Terminal::shell(&client, &session.id).await;
        let begun = Instant::now();
        shell.destroy(10_000).await;
        assert!(begun.elapsed() < Duration::from_secs(9));
        // A session's end is its terminals' end.
        let (_last, mut reader) = Terminal::shell(&client, &session.id).await;
        session.destroy();
        let end = loop {
            match reader.events.message().await {
                Ok(Some(_)) => {}
                end => break end,
            }
        };
        assert_eq!(end.unwrap_err().code(), tonic::Code::Unavailable);
    });
    server.assert_traces(0);
}

#[test]
fn destroying_leaves_nothing_native() {
    destroying_leaves_nothing("native");
}

#[test]
fn destroying_leaves_nothing_gvisor() {
    destroying_leaves_nothing("gvisor");
}

fn fifty_at_once(runtime: &str) {
    let server = Server::start_with(&["--default-runtime", runtime]);
    let session = server.session_with(&["--memory", "1GiB"]);
    block_on(async {
        let client = client(&server).await;
        let one = async |n: usize| {
            let (mut terminal, mut reader) = Terminal::shell(&client, &session.id).await;
            let echo = format!("echo $(({n} + 1000))\n");
            terminal.write(echo.as_bytes()).await;
            reader.until(&format!("{}\r\n", n + 1000)).await;
            (terminal, reader)
        };
        let mut open = Vec::new();
        for n in 0..50 {
            open.push(one(n).await);
        }
        let request = v1::ListTerminalsRequest {
            session_id: session.id.clone(),
        };
        let listed = client.clone().list_terminals(request).await.unwrap();
        assert_eq!(listed.into_inner().terminals.len(), 50);
        for (n, (terminal, reader)) in open.iter_mut().enumerate() {
            terminal.write(format!("exit {n}\n").as_bytes()).await;
            assert_eq!(reader.exited().await.0, i32::try_from(n).unwrap());
        }
    });
}

#[test]
fn fifty_at_once_native() {
    fifty_at_once("native");
}

#[test]
fn fifty_at_once_gvisor() {
    fifty_at_once("gvisor");
}

fn terminals_survive_kill_9(runtime: &str) {
    let mut server = Server::start_with(&["--default-runtime", runtime]);
    let session = server.session().id;
    let id = block_on(async {
        let client = client(&server).await;
        let (mut terminal, mut reader) = Terminal::shell(&client, &session).await;
        terminal.write(b"kept=$((40 + 2))\n").await;
        reader.until("ready> ").await;
        (terminal.id, terminal.pid)
    });
    server.kill();
    server.restart();
    block_on(async {
        let client = client(&server).await;
        let (id, pid) = id;
        let mut terminal = Terminal { client, id, pid };
        let mut reader = terminal.attach().await;
        reader.until("kept=$((40 + 2))").await;
        terminal.write(b"echo it-is-$kept\n").await;
        reader.until("it-is-42\r\n").await;
        terminal.destroy(-1).await;
    });
}

#[test]
fn terminals_survive_kill_9_native() {
    terminals_survive_kill_9("native");
}

#[test]
fn terminals_survive_kill_9_gvisor() {
    terminals_survive_kill_9("gvisor");
}

mod shell {
    //! `k8e sandbox shell` at a terminal of this test's.

    use k8e_e2e::Server;
    use rustix::fs::{Mode, OFlags};
    use rustix::pty::OpenptFlags;
    use rustix::termios::{Winsize, tcgetattr, tcsetwinsize};
    use std::io::Read as _;
    use std::os::fd::{AsFd as _, OwnedFd};
    use std::process::{Child, Stdio};
    use std::time::{Duration, Instant};

    struct Window {
        ours: std::fs::File,
        theirs: OwnedFd,
        child: Child,
        said: Vec<u8>,
    }

    fn size(rows: u16, cols: u16) -> Winsize {
        Winsize {
            ws_row: rows,
            ws_col: cols,
            ws_xpixel: 0,
            ws_ypixel: 0,
        }
    }

    impl Window {
        fn open(server: &Server, args: &[&str]) -> Self {
            let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
            let ours = rustix::pty::openpt(flags).unwrap();
            rustix::pty::unlockpt(&ours).unwrap();
            let name = rustix::pty::ptsname(&ours, Vec::new()).unwrap();
            let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
            let theirs = rustix::fs::open(name, flags, Mode::empty()).unwrap();
            tcsetwinsize(&ours, size(30, 90)).unwrap();
            let stdio = || Stdio::from(theirs.as_fd().try_clone_to_owned().unwrap());
            let child = server
                .command(&[&["sandbox", "shell"], args].concat())
                .stdin(stdio())
                .stdout(stdio())
                .stderr(stdio())
                .spawn()
                .unwrap();
            rustix::fs::fcntl_setfl(&ours, OFlags::NONBLOCK).unwrap();
            Self {
                ours: ours.into(),
                theirs,
                child,
                said: Vec::new(),
            }
        }

        fn until(&mut self, text: &str) {
            let deadline = Instant::now() + Duration::from_secs(30);
            loop {
                let mut parts = self.said.windows(text.len());
                if let Some(at) = parts.position(|part| part == text.as_bytes()) {
                    self.said.drain(..at + text.len());
                    return;
                }
                let mut buffer = [0; 4096];
                match self.ours.read(&mut buffer) {
                    Ok(read) => self.said.extend_from_slice(&buffer[..read]),
                    Err(_) => std::thread::sleep(Duration::from_millis(5)),
                }
                let said = String::from_utf8_lossy(&self.said);
                assert!(Instant::now() < deadline, "{text:?} is not in {said:?}");
            }
        }

        fn type_in(&mut self, text: &str) {
            use std::io::Write as _;
            self.ours.write_all(text.as_bytes()).unwrap();
        }

        fn is_raw(&self) -> bool {
            let modes = tcgetattr(&self.theirs).unwrap();
            !modes
                .local_modes
                .contains(rustix::termios::LocalModes::ICANON)
        }
    }

    const SHELL: [&str; 5] = ["--", "bash", "--norc", "--noediting", "-i"];

    #[test]
    fn is_like_being_there() {
        let server = Server::start();
        let session = server.session();
        let args = [&[session.id.as_str(), "--env", "PS1=ready> "], &SHELL[..]].concat();
        let mut window = Window::open(&server, &args);
        window.until("ready> ");
        assert!(window.is_raw());
        window.type_in("stty size\r");
        window.until("30 90\r\n");
        // It runs without a session of its own here, so nobody else tells it.
        tcsetwinsize(&window.ours, size(50, 120)).unwrap();
        let pid = rustix::process::Pid::from_child(&window.child);
        rustix::process::kill_process(pid, rustix::process::Signal::WINCH).unwrap();
        window.until("ready> ");
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            window.type_in("stty size; echo d''one\r");
            window.until("stty size");
            window.until("\r\n");
            let seen = window.said.len();
            window.until("done\r\n");
            let _ = seen;
            let ran = session.sh("for p in /dev/pts/[0-9]*; do stty size < $p; done");
            if ran.out() == "50 120\n" {
                break;
            }
            assert!(Instant::now() < deadline, "{}", ran.all());
        }
        // Ctrl-C goes inside.
        window.type_in("sleep 63.5\r");
        while session.sh("pgrep -fxc 'sleep 63[.]5'").out() != "1\n" {}
        window.type_in("\x03");
        while session.sh("pgrep -fxc 'sleep 63[.]5'").out() != "0\n" {}
        window.type_in("exit 9\r");
        assert_eq!(window.child.wait().unwrap().code(), Some(9));
        assert!(!window.is_raw(), "the terminal is as it was");
    }

    #[test]
    fn cleans_up_when_its_window_is_closed() {
        let server = Server::start();
        let session = server.session();
        let args = [&[session.id.as_str(), "--env", "PS1=ready> "], &SHELL[..]].concat();
        let mut window = Window::open(&server, &args);
        window.until("ready> ");
        let pid = rustix::process::Pid::from_child(&window.child);
        rustix::process::kill_process(pid, rustix::process::Signal::HUP).unwrap();
        assert_eq!(window.child.wait().unwrap().code(), Some(129));
        assert!(!window.is_raw());
        assert_eq!(session.sh("pgrep -xc bash").out(), "1\n", "its own");
    }

    #[test]
    fn can_be_attached_to_again() {
        let mut server = Server::start();
        let session = server.session().id;
        let args = [&[session.as_str(), "--env", "PS1=ready> "], &SHELL[..]].concat();
        let mut window = Window::open(&server, &args);
        window.until("ready> ");
        window.type_in("here=$((40 + 2))\r");
        window.until("ready> ");
        // An event is written a moment after what it is about; one that was read survives.
        let id = loop {
            let events = server.k8e(&["sandbox", "events", &session]).json();
            let events = events.to_string();
            if let Some(at) = events.find("term-") {
                break events[at..at + 25].to_owned();
            }
        };
        server.kill();
        assert_eq!(window.child.wait().unwrap().code(), Some(2));
        assert!(!window.is_raw());
        window.until("--attach ");
        window.until("\n");
        server.restart();
        let mut window = Window::open(&server, &["--attach", &id]);
        window.until("here=");
        window.type_in("echo is-$here; exit 3\r");
        window.until("is-42\r\n");
        assert_eq!(window.child.wait().unwrap().code(), Some(3));
    }

    #[test]
    fn needs_a_terminal_and_says_so() {
        let server = Server::start();
        let ran = server.k8e(&["sandbox", "shell"]);
        assert_eq!(ran.code, 1, "{}", ran.all());
        assert!(ran.err().contains("needs a terminal"), "{}", ran.all());
        assert_eq!(server.session_ids(), [""; 0], "nothing was made");
    }
}
