//! Pseudo-terminals: resizing, control characters, foreground process group, end.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "a test knows the replies it wants"
)]

use super::Lab;
use super::call::{Host, argv, bytes};
use k8e_wire::HostEnd;
use k8e_wire::proto::{
    AttachTerminal, CreateTerminal, EndTerminal, Exited, InspectTerminal, ResizeTerminal,
    SignalTerminal, TerminalState, WriteTerminal, reply::Reply, request::Call,
};

const SIGINT: i32 = 2;

/// The only terminal of a sandbox.
struct Terminal<'a> {
    host: Host<'a>,
    reader: HostEnd,
    said: String,
}

impl<'a> Terminal<'a> {
    async fn open(host: Host<'a>, args: &[&str]) -> Self {
        let create = CreateTerminal {
            id: id(),
            exec: Some(argv(args)),
            rows: 30,
            cols: 90,
            awaits_reader: false,
        };
        let mut end = host.call(Call::CreateTerminal(create)).await;
        let first = end.replies.next().await.expect("a reply");
        assert!(matches!(first, Reply::Started(_)), "{first:?}");
        // The terminal outlives the connection that created it.
        drop(end);
        let attach = Call::AttachTerminal(AttachTerminal { id: id() });
        let mut reader = host.call(attach).await;
        let first = reader.replies.next().await.expect("a reply");
        assert!(matches!(first, Reply::Started(_)), "{first:?}");
        Self {
            host,
            reader,
            said: String::new(),
        }
    }

    /// Reads until the output contains `text`.
    async fn until(&mut self, text: &str) {
        while !self.said.contains(text) {
            match self.reader.replies.next().await.expect("a reply") {
                Reply::Data(data) => self.said.push_str(&String::from_utf8_lossy(&data)),
                other => panic!("{text:?} is not in {:?}: {other:?}", self.said),
            }
        }
        self.said.clear();
    }

    async fn exited(&mut self) -> Exited {
        loop {
            match self.reader.replies.next().await.expect("a reply") {
                Reply::Data(_) => {}
                Reply::Exited(exited) => return exited,
                other => panic!("{other:?}"),
            }
        }
    }

    async fn one(&self, call: Call) -> Reply {
        let mut end = self.host.call(call).await;
        end.replies.next().await.expect("a reply")
    }

    async fn write(&self, text: &str) {
        let data = bytes(text);
        let write = Call::WriteTerminal(WriteTerminal { id: id(), data });
        let done = self.one(write).await;
        assert!(matches!(done, Reply::Done(_)), "{done:?}");
    }

    async fn inspect(&self) -> TerminalState {
        match self
            .one(Call::InspectTerminal(InspectTerminal { id: id() }))
            .await
        {
            Reply::Terminal(state) => state,
            other => panic!("{other:?}"),
        }
    }

    async fn until_foreground(&self, wanted: impl Fn(&TerminalState) -> bool) -> TerminalState {
        for _ in 0..1000 {
            let state = self.inspect().await;
            if state.foreground > 1 && wanted(&state) {
                return state;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        panic!("{:?}", self.inspect().await);
    }
}

fn id() -> String {
    "t".to_owned()
}

const SHELL: [&str; 5] = ["bash", "--norc", "--noprofile", "--noediting", "-i"];

/// Resizing, interrupt by control character, exit code.
pub async fn terminals_support_resize_and_control_characters(lab: &mut Lab) {
    let cell = lab.launch().await;
    let mut terminal = Terminal::open(cell.host(), &SHELL).await;
    terminal
        .write("test -t 0 -a -t 1 && stty size; trap 'echo winch''ed' WINCH\n")
        .await;
    terminal.until("30 90\r\n").await;
    let resize = ResizeTerminal {
        id: id(),
        rows: 44,
        cols: 111,
    };
    terminal.one(Call::ResizeTerminal(resize)).await;
    terminal.write("stty size\n").await;
    terminal.until("44 111\r\n").await;
    terminal.write("echo a''gain\n").await;
    terminal.until("again\r\n").await;
    terminal.write("exit 6\n").await;
    assert_eq!(terminal.exited().await.exit_code, 6);
}

/// The foreground process group is reported, and signals reach it.
pub async fn the_foreground_process_group_is_known(lab: &mut Lab) {
    let cell = lab.launch().await;
    let mut terminal = Terminal::open(cell.host(), &SHELL).await;
    terminal.write("echo re''ady\n").await;
    terminal.until("ready\r\n").await;
    let shell = terminal
        .until_foreground(|state| state.foreground == state.pid)
        .await;
    terminal.write("sleep 66.5\n").await;
    cell.host().wait_for("66.5", 1).await;
    let state = terminal
        .until_foreground(|state| state.foreground != shell.pid)
        .await;
    let script = format!("cat /proc/{}/comm", state.foreground);
    assert_eq!(cell.sh(&script).await.out(), "sleep");
    let signal = SignalTerminal {
        id: id(),
        signal: SIGINT,
    };
    terminal.one(Call::SignalTerminal(signal)).await;
    cell.host().wait_for("66.5", 0).await;
    terminal.write("sleep 67.5\n").await;
    cell.host().wait_for("67.5", 1).await;
    terminal
        .until_foreground(|state| state.foreground != shell.pid)
        .await;
    terminal.write("\x03").await;
    cell.host().wait_for("67.5", 0).await;
}

/// All descendants of the command are killed, also after `setsid` and double forks.
pub async fn ending_a_terminal_kills_its_process_tree(lab: &mut Lab) {
    let cell = lab.launch().await;
    let script =
        "trap '' TERM HUP; (setsid sleep 68.5 &); sleep 68.5 & while :; do sleep 68.5; done";
    let mut terminal = Terminal::open(cell.host(), &["sh", "-c", script]).await;
    cell.host().wait_for("68.5", 3).await;
    let end = EndTerminal {
        id: id(),
        grace_ms: 200,
    };
    let done = terminal.one(Call::EndTerminal(end)).await;
    assert!(matches!(done, Reply::Done(_)), "{done:?}");
    assert_eq!(cell.host().count("68.5").await, 0);
    assert_eq!(terminal.exited().await.signal, 9);
    assert_eq!(cell.sh("echo alive").await.out(), "alive");
}
