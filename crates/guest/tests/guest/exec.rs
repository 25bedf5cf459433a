//! Commands: exec, timeouts, cancellation, users, scripts, limits.

use crate::support::{
    argv, finish, marker, path_bytes, processes_with, sh, wait_for_processes, with_guest,
};
use bytes::Bytes;
use k8e_wire::proto::{
    End, EnvVar, ErrorCode, Exec, Hello, ListProcesses, Script, exec::Program, input::Input,
    reply::Reply, request::Call,
};
use std::time::{Duration, Instant};

fn script(interpreter: &str, extension: &str, code: &str) -> Option<Program> {
    let interpreter = vec![Bytes::copy_from_slice(interpreter.as_bytes())];
    Some(Program::Script(Script {
        interpreter,
        extension: extension.to_owned(),
        code: Bytes::copy_from_slice(code.as_bytes()),
        in_cwd: true,
    }))
}

#[test]
fn hello() {
    with_guest(async |guest| {
        let Ok(Reply::Hello(hello)) = guest.one(Call::Hello(Hello { count: true })).await else {
            panic!()
        };
        assert_eq!(hello.protocol, k8e_wire::PROTOCOL);
        assert!(hello.processes > 0, "the test's own process");
    });
}

#[test]
fn exit_codes_and_signals_are_exact() {
    with_guest(async |guest| {
        for (code, exit_code, signal) in [
            ("true", 0, 0),
            ("exit 3", 3, 0),
            ("exit 255", 255, 0),
            ("kill -9 $$", 137, 9),
            ("kill -TERM $$", 143, 15),
        ] {
            let ran = guest.exec(sh(code)).await.unwrap();
            assert_eq!(
                (ran.exited.exit_code, ran.exited.signal),
                (exit_code, signal),
                "{code}"
            );
            assert!(
                !ran.exited.timed_out
                    && ran.exited.duration_us > 0
                    && ran.exited.duration_us < 10_000_000
            );
        }
    });
}

#[test]
fn streams_are_separate_and_binary() {
    with_guest(async |guest| {
        let ran = guest
            .exec(sh(r"printf 'a\000\377\n'; printf 'b\200' >&2; echo end"))
            .await
            .unwrap();
        assert_eq!(ran.stdout, b"a\0\xff\nend\n");
        assert_eq!(ran.stderr, b"b\x80");
        assert_eq!((ran.exited.stdout_bytes, ran.exited.stderr_bytes), (8, 2));
        assert!(!ran.exited.stdout_truncated && !ran.exited.stderr_truncated);
    });
}

#[test]
fn much_on_stderr_alone_does_not_hang() {
    with_guest(async |guest| {
        let ran = guest
            .exec(sh("head -c 20000000 /dev/zero >&2"))
            .await
            .unwrap();
        assert_eq!(
            (ran.stderr.len(), ran.exited.stderr_bytes, ran.stdout.len()),
            (20_000_000, 20_000_000, 0)
        );
    });
}

#[test]
fn output_over_the_limit_is_counted_not_sent() {
    with_guest(async |guest| {
        let exec = Exec {
            output_bytes_max: 1000,
            ..sh("head -c 300000 /dev/zero; echo short >&2")
        };
        let ran = guest.exec(exec).await.unwrap();
        assert_eq!(
            (
                ran.stdout.len(),
                ran.exited.stdout_bytes,
                ran.exited.stdout_truncated
            ),
            (1000, 300_000, true)
        );
        assert_eq!(
            (ran.stderr.as_slice(), ran.exited.stderr_truncated),
            (&b"short\n"[..], false)
        );
    });
}

#[test]
fn input_goes_through() {
    with_guest(async |guest| {
        let end = guest
            .call(Call::Exec(Exec {
                stdin: true,
                ..argv(&["cat"])
            }))
            .await;
        let (mut inputs, replies) = (end.inputs, end.replies);
        let data: Vec<u8> = (0..3_000_000u32).flat_map(u32::to_ne_bytes).collect();
        let sent = Bytes::from(data.clone());
        let send = async move {
            for at in (0..sent.len()).step_by(100_000) {
                inputs
                    .send(Input::Data(sent.slice(at..at + 100_000)))
                    .await
                    .unwrap();
            }
            inputs.send(Input::End(End {})).await.unwrap();
            inputs
        };
        let receive = async {
            let mut replies = replies;
            let mut got = Vec::new();
            loop {
                match replies.next().await.unwrap() {
                    Reply::Stdout(data) => got.extend_from_slice(&data),
                    Reply::Started(_) => {}
                    Reply::Exited(exited) => return (got, exited),
                    other => panic!("{other:?}"),
                }
            }
        };
        let (_inputs, (got, exited)) = tokio::join!(send, receive);
        assert_eq!(exited.exit_code, 0);
        assert!(got == data);
    });
}

#[test]
fn without_input_the_command_reads_the_end() {
    with_guest(async |guest| {
        assert_eq!(
            guest.exec(sh("cat; echo ended")).await.unwrap().stdout,
            b"ended\n"
        );
    });
}

#[test]
fn unread_input_blocks_neither_output_nor_timeout_nor_cancel() {
    with_guest(async |guest| {
        let marker = marker();
        let code = format!("echo here; exec sleep {marker}");
        let mut end = guest
            .call(Call::Exec(Exec {
                stdin: true,
                timeout_ms: 700,
                ..sh(&code)
            }))
            .await;
        for _ in 0..8 {
            end.inputs
                .send(Input::Data(Bytes::from(vec![0; 100_000])))
                .await
                .unwrap();
        }
        let ran = finish(end).await.unwrap();
        assert_eq!(
            (ran.stdout.as_slice(), ran.exited.timed_out),
            (&b"here\n"[..], true)
        );

        // More than the guest holds, so that it no longer reads the connection.
        let mut end = guest
            .call(Call::Exec(Exec {
                stdin: true,
                ..sh(&code)
            }))
            .await;
        wait_for_processes(&marker, 1).await;
        let full = async {
            loop {
                end.inputs
                    .send(Input::Data(Bytes::from(vec![0; 100_000])))
                    .await
                    .unwrap();
            }
        };
        assert!(
            tokio::time::timeout(Duration::from_millis(300), full)
                .await
                .is_err()
        );
        drop(end);
        wait_for_processes(&marker, 0).await;
    });
}

#[test]
fn signals_reach_the_group() {
    with_guest(async |guest| {
        let mut end = guest
            .call(Call::Exec(sh(
                "trap 'exit 7' TERM; echo ready; while :; do sleep 0.01; done",
            )))
            .await;
        while !matches!(end.replies.next().await.unwrap(), Reply::Stdout(_)) {}
        end.inputs.send(Input::Signal(15)).await.unwrap();
        loop {
            // The shell may report on stderr that its child was terminated.
            match end.replies.next().await.unwrap() {
                Reply::Exited(exited) => break assert_eq!(exited.exit_code, 7),
                other => assert!(matches!(other, Reply::Stderr(_)), "{other:?}"),
            }
        }
    });
}

/// Background jobs, a new session, and a daemon that forked twice without environment.
fn hiding(marker: &str) -> String {
    format!(
        "sleep {marker} & setsid sleep {marker} & \
         env -i setsid /bin/sh -c '(setsid /bin/sh -c \"/bin/sleep {marker} & /bin/sleep {marker}\" &) & exit' & \
         sleep {marker}"
    )
}

#[test]
fn timeout_kills_everything() {
    with_guest(async |guest| {
        for _ in 0..5 {
            let marker = marker();
            let begin = Instant::now();
            let ran = guest
                .exec(Exec {
                    timeout_ms: 400,
                    ..sh(&hiding(&marker))
                })
                .await
                .unwrap();
            assert_eq!(
                (
                    ran.exited.exit_code,
                    ran.exited.signal,
                    ran.exited.timed_out
                ),
                (137, 9, true)
            );
            assert_eq!(processes_with(&marker), Vec::<i32>::new());
            assert!(
                begin.elapsed() < Duration::from_secs(3),
                "{:?}",
                begin.elapsed()
            );
        }
    });
}

#[test]
fn a_timeout_around_the_start_leaves_nothing() {
    with_guest(async |guest| {
        let marker = marker();
        for round in 0..40 {
            let exec = Exec {
                timeout_ms: 1 + round % 4,
                ..sh(&format!("sleep {marker} & setsid sleep {marker}"))
            };
            let ran = guest.exec(exec).await.unwrap();
            assert_eq!((ran.exited.exit_code, ran.exited.timed_out), (137, true));
            assert_eq!(processes_with(&marker), Vec::<i32>::new());
        }
    });
}

#[test]
fn timeout_kills_a_fork_storm() {
    with_guest(async |guest| {
        let marker = marker();
        let code = format!(
            "f() {{ (setsid sh -c 'sleep {marker}; :' &); }}; while :; do f; sleep 0.01; done"
        );
        let ran = guest
            .exec(Exec {
                timeout_ms: 500,
                ..sh(&code)
            })
            .await
            .unwrap();
        assert!(ran.exited.timed_out);
        assert_eq!(processes_with(&marker), Vec::<i32>::new());
    });
}

#[test]
fn timeout_works_while_the_host_reads_nothing() {
    with_guest(async |guest| {
        let marker = marker();
        let code = format!("sleep {marker} & cat /dev/zero");
        let end = guest
            .call(Call::Exec(Exec {
                timeout_ms: 300,
                ..sh(&code)
            }))
            .await;
        wait_for_processes(&marker, 1).await;
        wait_for_processes(&marker, 0).await;
        assert!(finish(end).await.unwrap().exited.timed_out);
    });
}

#[test]
fn closing_kills_everything() {
    with_guest(async |guest| {
        let marker = marker();
        let end = guest.call(Call::Exec(sh(&hiding(&marker)))).await;
        wait_for_processes(&marker, 5).await;
        drop(end);
        wait_for_processes(&marker, 0).await;

        let mut end = guest
            .call(Call::Exec(sh(&format!("sleep {marker} & cat /dev/zero"))))
            .await;
        while !matches!(end.replies.next().await.unwrap(), Reply::Stdout(_)) {}
        drop(end);
        wait_for_processes(&marker, 0).await;
    });
}

#[test]
fn a_background_process_outlives_a_command_that_ended() {
    with_guest(async |guest| {
        let marker = marker();
        // It logs to a stream of the ended command, which must not kill it.
        let go = guest.root.join("go");
        let code = format!(
            "(until test -e {}; do sleep 0.02; done; echo log; echo log; exec sleep {marker}) & \
             echo started",
            go.display()
        );
        let ran = guest.exec(sh(&code)).await.unwrap();
        assert_eq!(
            (ran.stdout.as_slice(), ran.exited.exit_code),
            (&b"started\n"[..], 0)
        );
        std::fs::write(go, "").unwrap();
        wait_for_processes(&marker, 1).await;
        assert_eq!(
            guest
                .exec(argv(&["pkill", "-f", &format!("sleep {marker}")]))
                .await
                .unwrap()
                .exited
                .exit_code,
            0
        );
        wait_for_processes(&marker, 0).await;
    });
}

#[test]
fn a_background_process_that_writes_forever_does_not_hold_the_command() {
    with_guest(async |guest| {
        let ran = guest
            .exec(sh("timeout 1 cat /dev/zero & sleep 0.1; exit 4"))
            .await
            .unwrap();
        assert_eq!(ran.exited.exit_code, 4);
    });
}

#[test]
fn a_killed_supervisor_ends_the_command() {
    with_guest(async |guest| {
        let marker = marker();
        let ran = guest
            .exec(sh(&format!(
                "sleep {marker} & kill -9 $PPID; sleep {marker}"
            )))
            .await
            .unwrap();
        assert_eq!((ran.exited.exit_code, ran.exited.signal), (137, 9));
        wait_for_processes(&marker, 0).await;
    });
}

#[test]
fn programs_that_cannot_run_are_reported() {
    with_guest(async |guest| {
        let error = guest
            .exec(argv(&["no-such-program-here"]))
            .await
            .unwrap_err();
        assert_eq!(error.code(), ErrorCode::NoProgram);
        assert!(
            error.message.contains("no-such-program-here"),
            "{}",
            error.message
        );
        assert_eq!(
            guest.exec(argv(&["/nope/prog"])).await.unwrap_err().code(),
            ErrorCode::NoProgram
        );
        assert_eq!(
            guest.exec(argv(&["/etc/passwd"])).await.unwrap_err().code(),
            ErrorCode::Permission
        );
        assert_eq!(
            guest.exec(argv(&[])).await.unwrap_err().code(),
            ErrorCode::Invalid
        );
        assert_eq!(
            guest.exec(argv(&["a\0b"])).await.unwrap_err().code(),
            ErrorCode::Invalid
        );
        let long = "x".repeat(200_000);
        assert_eq!(
            guest.exec(argv(&["true", &long])).await.unwrap_err().code(),
            ErrorCode::Invalid
        );
        let nowhere = Exec {
            cwd: Bytes::from_static(b"relative"),
            ..sh("true")
        };
        assert_eq!(
            guest.exec(nowhere).await.unwrap_err().code(),
            ErrorCode::Invalid
        );
        let nobody = Exec {
            user: "no-such-user".to_owned(),
            ..sh("true")
        };
        assert_eq!(
            guest.exec(nobody).await.unwrap_err().code(),
            ErrorCode::Invalid
        );
    });
}

#[test]
fn environment_directory_and_user() {
    with_guest(async |guest| {
        let cwd = guest.root.join("made/for/it");
        let env = vec![EnvVar {
            name: Bytes::from_static(b"X"),
            value: Bytes::from_static(b"\xff y"),
        }];
        let exec = Exec {
            cwd: path_bytes(&cwd),
            env,
            ..sh("pwd; env | LC_ALL=C sort; trap; ulimit -n >/dev/null")
        };
        let ran = guest.exec(exec).await.unwrap();
        let mut want = format!("{}\nHOME=/root\nLANG=C.UTF-8\n", cwd.display()).into_bytes();
        want.extend_from_slice(
            b"PATH=/root/.local/bin:/etc/k8e/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n",
        );
        want.extend_from_slice(
            format!("PWD={}\nUSER=root\nX=\u{0}", cwd.display())
                .trim_end_matches('\0')
                .as_bytes(),
        );
        want.extend_from_slice(b"\xff y\n");
        assert_eq!(
            String::from_utf8_lossy(&ran.stdout),
            String::from_utf8_lossy(&want)
        );

        let ran = guest
            .exec(Exec {
                user: "nobody".to_owned(),
                ..sh("id -un; id -u; echo $USER; cat /etc/shadow")
            })
            .await;
        let ran = ran.unwrap();
        assert_eq!(
            String::from_utf8_lossy(&ran.stdout),
            "nobody\n65534\nnobody\n"
        );
        assert_eq!(ran.exited.exit_code, 1);
        let ran = guest
            .exec(Exec {
                user: "4242".to_owned(),
                ..sh("id -u; id -g; id -G")
            })
            .await
            .unwrap();
        assert_eq!(ran.stdout, b"4242\n4242\n4242\n");
    });
}

#[test]
fn commands_start_clean() {
    with_guest(async |guest| {
        let ran = guest
            .exec(sh(
                "ls -l /proc/self/fd | wc -l; grep -E 'Sig(Blk|Ign)' /proc/self/status",
            ))
            .await
            .unwrap();
        // total, 0, 1, 2, and the directory that ls itself reads.
        let want = "5\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n";
        assert_eq!(String::from_utf8_lossy(&ran.stdout), want);
        let ran = guest
            .exec(sh("cut -d' ' -f5,6 /proc/$$/stat; echo $$
                 # Set by the supervisor once the command runs: not in its first instant.
                 for _ in $(seq 100); do
                     score=$(cat /proc/$$/oom_score_adj); [ $score != 0 ] && break; sleep 0.05
                 done; echo $score"))
            .await
            .unwrap();
        let pid = ran.pid;
        assert_eq!(
            String::from_utf8_lossy(&ran.stdout),
            format!("{pid} {pid}\n{pid}\n500\n")
        );
    });
}

/// A command that has ended may have left behind what uses up the memory.
#[test]
fn what_a_short_command_leaves_behind_is_killed_before_the_guest() {
    with_guest(async |guest| {
        // Its supervisor may be late on a machine with much to do.
        for _ in 0..50 {
            let script = "sleep 5 >/dev/null 2>&1 & cat /proc/$!/oom_score_adj";
            if guest.exec(sh(script)).await.unwrap().stdout == b"500\n" {
                return;
            }
        }
        panic!("none had the score");
    });
}

#[test]
fn a_script_imports_from_its_directory_and_leaves_nothing() {
    with_guest(async |guest| {
        std::fs::write(guest.root.join("helper.py"), "value = 'imported'\n").unwrap();
        let code = "import helper, sys, os\nprint(helper.value, oct(os.stat(__file__).st_mode)[-3:])\nsys.exit(5)\n";
        let exec = Exec {
            program: script("python3", "py", code),
            cwd: guest.root_bytes(),
            ..Exec::default()
        };
        let env = std::env::var_os("PATH").unwrap();
        let env = vec![EnvVar {
            name: Bytes::from_static(b"PATH"),
            value: path_bytes(env.as_ref()),
        }];
        let ran = guest.exec(Exec { env, ..exec }).await.unwrap();
        assert_eq!(
            String::from_utf8_lossy(&ran.stdout),
            "imported 600\n",
            "{}",
            String::from_utf8_lossy(&ran.stderr)
        );
        assert_eq!(ran.exited.exit_code, 5);

        let exec = Exec {
            program: script("sh", "sh", "sleep 60"),
            cwd: guest.root_bytes(),
            ..Exec::default()
        };
        let mut end = guest.call(Call::Exec(exec.clone())).await;
        let Reply::Started(_) = end.replies.next().await.unwrap() else {
            panic!()
        };
        drop(end);
        let timed_out = guest
            .exec(Exec {
                timeout_ms: 50,
                ..exec
            })
            .await
            .unwrap();
        assert!(timed_out.exited.timed_out);
        let user = Exec {
            program: script("sh", "sh", "cat $0 | wc -c"),
            user: "nobody".to_owned(),
            ..Exec::default()
        };
        let ran = guest
            .exec(Exec {
                cwd: Bytes::from_static(b"/tmp"),
                ..user
            })
            .await
            .unwrap();
        assert_eq!(ran.stdout, b"14\n");
        for _ in 0..400 {
            let left = std::fs::read_dir(&guest.root).unwrap().flatten();
            if !left
                .into_iter()
                .any(|entry| entry.file_name().to_string_lossy().starts_with(".k8e"))
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("a script was left behind");
    });
}

#[test]
fn processes_are_listed() {
    with_guest(async |guest| {
        let marker = marker();
        let _end = guest
            .call(Call::Exec(sh(&format!("exec sleep {marker}"))))
            .await;
        wait_for_processes(&marker, 1).await;
        let mut end = guest.call(Call::ListProcesses(ListProcesses {})).await;
        let mut found = None;
        loop {
            match end.replies.next().await.unwrap() {
                Reply::Processes(list) => {
                    let want = format!("sleep\0{marker}");
                    found = found.or(list
                        .processes
                        .into_iter()
                        .find(|process| process.cmdline == want.as_bytes()));
                }
                Reply::Done(_) => break,
                other => panic!("{other:?}"),
            }
        }
        let found = found.unwrap();
        assert_eq!(
            (found.comm.as_ref(), found.state.as_str(), found.uid),
            (&b"sleep"[..], "S", 0)
        );
        assert!(found.rss_bytes > 0 && found.ppid > 1);
    });
}

#[test]
fn many_at_once_and_nothing_left() {
    with_guest(async |guest| {
        let guest = std::sync::Arc::new(guest);
        let runs: Vec<_> = (0..200)
            .map(|n| {
                let guest = std::sync::Arc::clone(&guest);
                tokio::spawn(async move {
                    guest
                        .exec(sh(&format!("echo {n}; exit {}", n % 100)))
                        .await
                        .unwrap()
                })
            })
            .collect();
        for (n, run) in runs.into_iter().enumerate() {
            let ran = run.await.unwrap();
            assert_eq!(ran.stdout, format!("{n}\n").as_bytes());
            assert_eq!(ran.exited.exit_code as usize, n % 100);
        }
    });
}

#[test]
fn a_guest_that_goes_away_takes_its_commands_along() {
    let marker = marker();
    with_guest(async |guest| {
        let end = guest.call(Call::Exec(sh(&hiding(&marker)))).await;
        wait_for_processes(&marker, 5).await;
        std::mem::forget(end);
    });
    assert_eq!(processes_with(&marker), Vec::<i32>::new());
}
