//! Commands: exit status, output, input, signals, timeouts, users, environment.

use super::Lab;
use super::call::{argv, bytes, finish, sh};
use k8e_wire::proto::{
    AttachRun, End, EndRun, ErrorCode, Exec, ForgetRun, Script, StartRun, exec::Program,
    input::Input, reply::Reply, request::Call,
};
use std::time::Duration;

/// Exit codes and signals of commands are reported unchanged.
pub async fn commands_report_exit_codes_and_signals(lab: &mut Lab) {
    let cell = lab.launch().await;
    let end = |ran: &super::Ran| {
        (
            ran.exited.exit_code,
            ran.exited.signal,
            ran.exited.timed_out,
        )
    };
    assert_eq!(end(&cell.sh("exit 0").await), (0, 0, false));
    assert_eq!(end(&cell.sh("exit 3").await), (3, 0, false));
    assert_eq!(end(&cell.sh("kill -9 $$").await), (137, 9, false));
    assert_eq!(end(&cell.sh("kill -TERM $$").await), (143, 15, false));
    let missing = cell.host().exec(argv(&["no-such-program"])).await;
    assert_eq!(
        missing.expect_err("there is none").code(),
        ErrorCode::NoProgram
    );
    let script = Script {
        interpreter: vec![bytes("python3")],
        extension: "py".to_owned(),
        code: bytes("import sys; print(6 * 7); sys.exit(5)"),
        in_cwd: false,
    };
    let exec = Exec {
        program: Some(Program::Script(script)),
        ..argv(&[])
    };
    let ran = cell.host().exec(exec).await.expect("python runs");
    assert_eq!((ran.out().as_str(), ran.exited.exit_code), ("42", 5));
}

/// The guest's pre-forked supervisor is a process like others: killing or stopping all processes must
/// not prevent the next command.
pub async fn a_command_runs_after_all_processes_were_killed(lab: &mut Lab) {
    let cell = lab.launch().await;
    for signal in ["KILL", "STOP"] {
        // After the guest has pre-forked the next supervisor.
        let script =
            format!("(sleep 0.4; kill -{signal} -- -1; echo > {signal}) > /dev/null 2>&1 &");
        let ran = cell.host().exec(argv(&["bash", "-c", &script])).await;
        assert_eq!(ran.expect("it runs").exited.exit_code, 0);
        // Not by a command, which would be killed as well.
        while cell.host().read(signal).await.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        for _ in 0..2 {
            assert_eq!(cell.sh("echo alive").await.out(), "alive", "{signal}");
        }
    }
}

/// Stdout and stderr arrive separately, complete and in order.
pub async fn output_streams_are_separate_and_complete(lab: &mut Lab) {
    let cell = lab.launch().await;
    let ran = cell.sh("echo out; echo err >&2").await;
    assert_eq!(
        (ran.stdout, ran.stderr),
        (b"out\n".to_vec(), b"err\n".to_vec())
    );
    let ran = cell.sh("seq 1 200000").await;
    let expected: String = (1..=200_000).map(|n| format!("{n}\n")).collect();
    assert!(
        ran.stdout == expected.as_bytes(),
        "{} bytes",
        ran.stdout.len()
    );
    let exec = Exec {
        output_bytes_max: 1000,
        ..sh("seq 1 100000; echo done >&2")
    };
    let ran = cell.host().exec(exec).await.expect("it runs");
    assert!(
        ran.exited.stdout_truncated && ran.stdout.len() == 1000,
        "{}",
        ran.stdout.len()
    );
    assert_eq!(ran.stderr, b"done\n");
}

/// Standard input reaches the command, up to EOF.
pub async fn input_reaches_the_command(lab: &mut Lab) {
    let cell = lab.launch().await;
    let exec = Exec {
        stdin: true,
        ..sh("cat; echo over")
    };
    let mut end = cell.host().call(Call::Exec(exec)).await;
    for part in ["a", "b\n", "c"] {
        end.inputs
            .send(Input::Data(bytes(part)))
            .await
            .expect("taken");
    }
    end.inputs.send(Input::End(End {})).await.expect("taken");
    let ran = finish(&mut end).await.expect("it runs");
    assert_eq!(ran.out(), "ab\ncover");
    assert_eq!(cell.sh("cat; echo nothing").await.out(), "nothing");
}

/// Signals that the host sends reach the command.
pub async fn signals_reach_the_command(lab: &mut Lab) {
    let cell = lab.launch().await;
    let script = "trap 'echo caught; exit 7' TERM; echo ready; while :; do sleep 0.05; done";
    let mut end = cell.host().call(Call::Exec(sh(script))).await;
    loop {
        if let Reply::Stdout(_) = end.replies.next().await.expect("a reply") {
            break;
        }
    }
    end.inputs.send(Input::Signal(15)).await.expect("taken");
    let ran = finish(&mut end).await.expect("it runs");
    assert_eq!((ran.out().as_str(), ran.exited.exit_code), ("caught", 7));
}

/// A timeout kills all descendants, also after `setsid` and double forks.
pub async fn a_timeout_kills_the_process_tree(lab: &mut Lab) {
    let cell = lab.launch().await;
    let exec = Exec {
        timeout_ms: 700,
        ..sh("(setsid sleep 61.5 &); (setsid sh -c 'sleep 61.5 & wait' &); env -i sleep 61.5")
    };
    let ran = cell.host().exec(exec).await.expect("it runs");
    assert!(ran.exited.timed_out, "{ran:?}");
    assert_eq!(ran.exited.exit_code, 137);
    assert!(ran.exited.duration_us < 10_000_000, "{ran:?}");
    assert_eq!(cell.host().count("61.5").await, 0);
    assert_eq!(cell.sh("echo alive").await.out(), "alive");
}

/// The same when the host closes the connection.
pub async fn cancelling_kills_the_process_tree(lab: &mut Lab) {
    let cell = lab.launch().await;
    let call = Call::Exec(sh("(setsid sleep 62.5 &); sleep 62.5"));
    let end = cell.host().call(call).await;
    cell.host().wait_for("62.5", 2).await;
    drop(end);
    cell.host().wait_for("62.5", 0).await;
}

/// Background processes of a command that exits by itself keep running.
pub async fn background_processes_survive_their_command(lab: &mut Lab) {
    let cell = lab.launch().await;
    cell.sh("setsid sleep 63.5 >/dev/null 2>&1 &").await;
    cell.host().wait_for("63.5", 1).await;
    assert_eq!(cell.sh("pkill -x sleep; echo $?").await.out(), "0");
    cell.host().wait_for("63.5", 0).await;
    // Orphans are reaped.
    cell.sh("for n in 1 2 3 4 5; do (sleep 0.0$n &); done; sleep 0.3")
        .await;
    let zombies = cell.sh("grep -l '^State:.Z' /proc/[0-9]*/status").await;
    assert_eq!(zombies.out(), "");
}

/// The host can disconnect from a detached run and attach again.
pub async fn detached_runs_outlive_their_connection(lab: &mut Lab) {
    let cell = lab.launch().await;
    let start = StartRun {
        id: "r".to_owned(),
        exec: Some(sh("(setsid sleep 64.5 &); echo up; sleep 0.5; exit 9")),
    };
    let mut end = cell.host().call(Call::StartRun(start)).await;
    let first = end.replies.next().await.expect("a reply");
    assert!(matches!(first, Reply::Started(_)), "{first:?}");
    drop(end);
    let id = || "r".to_owned();
    let attach = AttachRun {
        id: id(),
        now: false,
    };
    let mut end = cell.host().call(Call::AttachRun(attach)).await;
    let ran = finish(&mut end).await.expect("it is kept");
    assert_eq!((ran.out().as_str(), ran.exited.exit_code), ("up", 9));
    let forgotten = cell.host().done(Call::ForgetRun(ForgetRun { id: id() }));
    forgotten.await.expect("it is forgotten");
    let again = cell.host().done(Call::EndRun(EndRun { id: id() })).await;
    assert_eq!(again.expect_err("it is gone").code(), ErrorCode::NotFound);

    let start = StartRun {
        id: id(),
        exec: Some(sh("(setsid sleep 65.5 &); sleep 65.5")),
    };
    drop(cell.host().call(Call::StartRun(start)).await);
    // A call that is dropped that early may have started nothing.
    let end = async || cell.host().done(Call::EndRun(EndRun { id: id() })).await;
    if end().await.is_ok() {
        assert_eq!(cell.host().count("65.5").await, 0);
    }
}

/// Commands run as root or as an unprivileged user.
pub async fn commands_run_as_the_requested_user(lab: &mut Lab) {
    let cell = lab.launch().await;
    assert_eq!(cell.sh("id -u; id -g").await.out(), "0\n0");
    let exec = Exec {
        user: "user".to_owned(),
        ..sh(
            "id -u; id -g; echo $HOME; ls /root 2>&1 >/dev/null | grep -c denied; touch ~/mine && echo made",
        )
    };
    let ran = cell.host().exec(exec).await.expect("it runs");
    assert_eq!(ran.out(), "1000\n1000\n/home/user\n1\nmade", "{ran:?}");
    assert_eq!(cell.sh("stat -c %U /home/user/mine").await.out(), "user");
}

/// `/dev`, `/proc`, writable system directories, FIFOs, links, threads and child processes work.
pub async fn programs_see_a_whole_system(lab: &mut Lab) {
    let cell = lab.launch().await;
    let script = "
        set -e
        hostname
        test -c /dev/null && test -c /dev/urandom && test -d /dev/shm && test -d /dev/pts
        echo x > /dev/shm/x; cat /proc/self/comm; test -r /proc/meminfo; ls /proc/self/fd >/dev/null
        echo new > /usr/local/bin/new; echo 1 >> /etc/hosts; mkdir -p /opt/a/b; touch /root/r /tmp/t /var/tmp/v /workspace/w
        mkfifo /tmp/fifo; (echo through > /tmp/fifo &) ; cat /tmp/fifo
        ln -s /tmp/t /tmp/link; readlink /tmp/link; ln /tmp/t /tmp/hard
        python3 -c 'import threading, subprocess, sqlite3, ssl, multiprocessing as m
t = threading.Thread(target=print, args=(\"thread\",)); t.start(); t.join()
print(subprocess.check_output([\"echo\", \"child\"]).decode().strip())
with m.Pool(2) as p: print(sum(p.map(abs, [-1, -2])))'
    ";
    let ran = cell.sh(script).await;
    let expected = "sandbox\ncat\nthrough\n/tmp/t\nthread\nchild\n3";
    assert_eq!(
        ran.out(),
        expected,
        "{}",
        String::from_utf8_lossy(&ran.stderr)
    );
}

/// There is no network but loopback.
pub async fn loopback_is_the_only_network(lab: &mut Lab) {
    let cell = lab.launch().await;
    // A new sandbox comes with the listening sockets of its egress proxy, in which connections would wait: a
    // server that is gone has closed them.
    drop(cell.sandbox.network().await.expect("its network"));
    let script = "python3 -c '
import socket
s = socket.create_server((\"127.0.0.1\", 80)); c = socket.create_connection((\"127.0.0.1\", 80), 5)
c.send(b\"x\"); print(s.accept()[0].recv(1))
for to in (\"192.0.2.1\", \"169.254.169.254\", \"10.0.0.1\"):
    try: socket.create_connection((to, 80), 2); print(\"reached\", to)
    except OSError as e: print(type(e).__name__ != \"TimeoutError\")
'";
    let ran = cell.sh(script).await;
    assert_eq!(
        ran.out(),
        "b'x'\nTrue\nTrue\nTrue",
        "{}",
        String::from_utf8_lossy(&ran.stderr)
    );
}

/// Unix sockets inside the sandbox work, including descriptor passing.
pub async fn local_sockets_work(lab: &mut Lab) {
    let cell = lab.launch().await;
    let script = "python3 -c '
import os, socket
for name in (\"/tmp/s\", \"/workspace/s\", \"\\0abstract\"):
    s = socket.socket(socket.AF_UNIX); s.bind(name); s.listen()
    if os.fork() == 0:
        c = socket.socket(socket.AF_UNIX); c.connect(name)
        fd = os.open(\"/etc/passwd\", os.O_RDONLY)
        socket.send_fds(c, [b\"x\"], [fd]); os._exit(0)
    c, _ = s.accept()
    data, fds, _, _ = socket.recv_fds(c, 10, 1)
    print(data, os.read(fds[0], 4)); os.wait()
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.send(b\"y\"); print(b.recv(1))
'";
    let ran = cell.sh(script).await;
    let one = "b'x' b'root'\n".repeat(3);
    assert_eq!(
        ran.out(),
        format!("{one}b'y'"),
        "{}",
        String::from_utf8_lossy(&ran.stderr)
    );
}
