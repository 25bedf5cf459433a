"""Drives every call of sandbox.v1 with grpcio, and stubs that grpcio-tools made from our proto."""

import concurrent.futures
import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

import grpc

sys.path.insert(0, os.environ["STUBS"])
from sandbox.v1 import sandbox_pb2 as pb  # noqa: E402
from sandbox.v1 import sandbox_pb2_grpc as stubs  # noqa: E402

ENDPOINT = os.environ["ENDPOINT"]
MIB = 1024 * 1024
SOON = 60
OPTIONS = [("grpc.max_receive_message_length", 64 * MIB), ("grpc.max_send_message_length", 64 * MIB)]
SERVICE = pb.DESCRIPTOR.services_by_name["SandboxService"]
called = set()


def read(name):
    with open(os.environ[name], "rb") as file:
        return file.read()


class Client:
    """A stub that remembers what was called."""

    def __init__(self, key=None, cert=None, metadata=()):
        credentials = grpc.ssl_channel_credentials(read("CA"), key, cert)
        self.stub = stubs.SandboxServiceStub(grpc.secure_channel(ENDPOINT, credentials, OPTIONS))
        self.metadata = metadata

    def __getattr__(self, rpc):
        method = SERVICE.methods_by_name[rpc]
        request = pb.DESCRIPTOR.message_types_by_name[method.input_type.name]._concrete_class

        def call(deadline=SOON, metadata=(), **fields):
            called.add(rpc)
            everything = tuple(self.metadata) + tuple(metadata)
            return getattr(self.stub, rpc)(request(**fields), timeout=deadline, metadata=everything)

        return call


def equal(have, want):
    assert have == want, f"{have!r} instead of {want!r}"


def refused(code, text, call, **fields):
    try:
        answer = call(**fields)
        for _ in answer if hasattr(answer, "__next__") else ():
            pass
    except grpc.RpcError as error:
        equal(error.code(), code)
        assert text in error.details(), f"{error.details()!r} does not say {text!r}"
        return
    raise AssertionError(f"was not refused: {answer}")


def until(what, check):
    deadline = time.monotonic() + SOON
    while not check():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.05)


def log_in():
    """A certificate for an API key, and a client that has nothing else."""
    with_key = Client(metadata=[("authorization", "Bearer " + os.environ["APIKEY"])])
    granted = with_key.Login(csr=read("CSR").decode(), device_name="contract", client_version="1")
    equal(granted.ca_cert.encode(), read("CA"))
    equal(granted.valid_days, 90)
    client = Client(read("KEY"), granted.cert.encode())
    host, port = ENDPOINT.split(":")
    shown = ssl.get_server_certificate((host, int(port)))
    equal(client.GetCACert().cert.split(), shown.split())
    wrong = Client(metadata=[("authorization", "Bearer k8e_" + "0" * 64)])
    refused(grpc.StatusCode.UNAUTHENTICATED, "invalid API key", wrong.Login, csr="x")
    return client


def sessions(client):
    probe = dict(session_id="healthcheck-probe-noop")
    refused(grpc.StatusCode.NOT_FOUND, "not found", client.DestroySession, **probe)
    made = client.CreateSession(
        tenant_id="contract",
        runtime_class=os.environ["RUNTIME"],
        allowed_hosts=["example.com"],
        env={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/workspace/wheels", "GREETING": "hi"},
        secret_refs=[pb.SecretRef(secret_name="github", key="token", env_var="TOKEN")],
    )
    sid = made.session_id
    assert sid.startswith("sess-"), sid
    shown = client.GetSession(session_id=sid)
    equal((shown.phase, shown.tenant_id), ("Active", "contract"))
    equal(shown.runtime_class, os.environ["RUNTIME"])
    equal(list(shown.allowed_hosts), ["example.com"])
    equal(sorted(shown.env_keys), ["GREETING", "PIP_FIND_LINKS", "PIP_NO_INDEX"])
    equal(list(shown.secret_env_vars), ["TOKEN"])
    equal([one.session_id for one in client.ListSessions().sessions], [sid])
    equal(len(client.ListSessions(phase="all").sessions), 1)
    hosts = client.UpdateAllowedHosts(session_id=sid, hosts=["example.org", "*.example.net"]).hosts
    equal(sorted(hosts), ["*.example.net", "example.org"])
    equal(list(client.UpdateAllowedHosts(session_id=sid, hosts=[]).hosts), [])
    equal(list(client.GetSession(session_id=sid).allowed_hosts), [])
    refused(grpc.StatusCode.INVALID_ARGUMENT, "env: ", client.CreateSession, env={"A=B": ""})
    many = {f"K{n}": "" for n in range(65)}
    refused(grpc.StatusCode.INVALID_ARGUMENT, "env: ", client.CreateSession, env=many)
    refs = [pb.SecretRef(secret_name="a", key="b")]
    refused(grpc.StatusCode.INVALID_ARGUMENT, "secret_refs: ", client.CreateSession, secret_refs=refs)
    refused(grpc.StatusCode.INVALID_ARGUMENT, "session_id required", client.GetSession)
    refused(grpc.StatusCode.NOT_FOUND, "session No/Such not found", client.GetSession, session_id="No/Such")
    named = client.CreateSession(session_id="named-by-its-client", runtime_class=os.environ["RUNTIME"])
    equal(named.session_id, "named-by-its-client")
    equal(client.DestroySession(session_id="named-by-its-client").ok, True)
    refused(grpc.StatusCode.NOT_FOUND, "not found", client.Exec, session_id="named-by-its-client", command="true")
    return sid


def commands(client, sid):
    done = client.Exec(session_id=sid, command="pwd; echo $GREETING; echo oops >&2; exit 7", language="bash")
    equal((done.stdout, done.stderr, done.exit_code), ("/workspace\nhi\n", "oops\n", 7))
    equal((done.status, done.session_id, done.language), ("completed", sid, "bash"))
    equal(client.Exec(session_id=sid, command="pwd", workdir="/tmp").stdout, "/tmp\n")
    equal(client.Exec(session_id=sid, command="echo ${#TOKEN}").stdout, f"{len(os.environ['SECRET'])}\n")
    slow = client.Exec(session_id=sid, command="echo begun; sleep 1000", timeout=1)
    equal((slow.status, slow.stdout), ("timed_out", "begun\n"))
    assert slow.exit_code != 0 and slow.duration_ms >= 1000, slow
    flood = client.Exec(session_id=sid, command="head -c 100000000 /dev/zero | tr '\\0' x >&2; echo end", timeout=50)
    equal((flood.exit_code, flood.stdout, len(flood.stderr), flood.truncated), (0, "end\n", MIB, True))
    raw = client.Exec(session_id=sid, command="printf 'a\\377b\\n\\001'")
    equal(raw.stdout, "a\ufffdb\n\x01")
    refused(grpc.StatusCode.INVALID_ARGUMENT, "timeout", client.Exec, session_id=sid, command="true", timeout=-1)
    refused(grpc.StatusCode.NOT_FOUND, "session gone not found", client.Exec, session_id="gone", command="true")


def running(client, sid, what):
    """Whether a program whose name starts like that runs."""
    names = [process.comm for process in client.GetProcesses(session_id=sid).processes]
    return any(name.startswith(what) for name in names)


def broken_off(client, sid):
    """Who leaves takes his command along."""
    client.Exec(session_id=sid, command="cp /bin/sleep /tmp/deadliner; cp /bin/sleep /tmp/cancelled")
    wait = dict(session_id=sid, command="/tmp/deadliner 1000", timeout=500, deadline=1.5)
    refused(grpc.StatusCode.DEADLINE_EXCEEDED, "", client.Exec, **wait)
    until("the end of the command", lambda: not running(client, sid, "deadliner"))
    stream = client.ExecStream(session_id=sid, command="echo up; /tmp/cancelled 1000")
    equal(next(stream).chunk, "up\n")
    until("the command", lambda: running(client, sid, "cancelled"))
    stream.cancel()
    until("the end of the command", lambda: not running(client, sid, "cancelled"))


def decoded(text):
    """As a client of K8E reads frames."""
    data, exits = "", []
    while "\n\n" in text:
        event, text = text.split("\n\n", 1)
        if not event.startswith("data: "):
            continue
        event = event[len("data: ") :]
        if event.startswith('{"exit"'):
            exits.append(json.loads(event)["exit"])
        elif not event.startswith('{"pid"'):
            data += event
    return data, exits


def streams(client, sid):
    stream = client.ExecStream(session_id=sid, command="printf 'a\\303'; sleep 0.3; printf '\\251\\n\\n'; echo e >&2; exit 3")
    chunks = [answer.chunk for answer in stream]
    equal(sorted("".join(chunks)), sorted("a\u00e9\n\ne\n"))
    trailers = dict(stream.trailing_metadata())
    equal((trailers["x-k8e-exit-code"], trailers["x-k8e-status"]), ("3", "completed"))
    forged = 'echo hello; echo; echo \'{"exit":0}\'; exit 9'
    frames = client.ExecStream(session_id=sid, command=forged, metadata=[("x-k8e-stream", "sse")])
    text = "".join(answer.chunk for answer in frames)
    assert text.startswith('data: {"pid":'), text
    data, exits = decoded(text)
    equal((data.replace("\r", ""), exits), ('hello\n\n{"exit":0}\n', [9]))


def background(client, sid):
    start = lambda command: client.Exec(session_id=sid, command=command, background=True)  # noqa: E731
    poll = lambda run: client.PollRun(run_id=run.run_id)  # noqa: E731
    command = "echo begun; until test -e go; do sleep 0.05; done; echo done >&2; exit 4"
    runs = [start(command) for _ in range(5)]
    equal({run.status for run in runs}, {"started"})
    equal(client.GetSession(session_id=sid).background_runs, 5)
    refused(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "background run limit reached (5 active runs)",
        client.Exec,
        session_id=sid,
        command="true",
        background=True,
    )
    until("its output", lambda: poll(runs[0]).stdout == "begun\n")
    equal(poll(runs[0]).status, "running")
    client.WriteFile(session_id=sid, path="go", content="")
    for run in runs:
        until("the end of a run", lambda run=run: poll(run).status == "completed")
        ended = poll(run)
        equal((ended.exit_code, ended.stdout, ended.stderr), (4, "begun\n", "done\n"))
    sixth = start("exit 6")
    until("the end of the sixth", lambda: poll(sixth).status == "completed")
    equal(poll(sixth).exit_code, 6)
    refused(grpc.StatusCode.NOT_FOUND, "run run-nope not found", client.PollRun, run_id="run-nope")


def files(client, sid):
    content = "h\u00e9llo\n" * 400000
    equal(client.WriteFile(session_id=sid, path="deep/er/text.txt", content=content).ok, True)
    client.WriteFile(session_id=sid, path="/workspace/deep/er/text.txt", content="more", mode="a")
    equal(client.ReadFile(session_id=sid, path="deep/er/text.txt").content, content + "more")
    client.WriteFile(session_id=sid, path="with space%20", content="x", mode="0755")
    equal(client.ReadFile(session_id=sid, path="/workspace/with space%20").content, "x")
    equal(client.Exec(session_id=sid, command="stat -c %a 'with space%20'").stdout, "755\n")
    refused(grpc.StatusCode.NOT_FOUND, "missing", client.ReadFile, session_id=sid, path="missing")
    client.Exec(session_id=sid, command="printf '\\377\\000' > binary; ln -s binary link; : > empty")
    refused(grpc.StatusCode.FAILED_PRECONDITION, "k8e.v1 ReadFile", client.ReadFile, session_id=sid, path="binary")
    equal(client.ReadFile(session_id=sid, path="empty").content, "")
    for path in "/etc/x", "/tmp/x.py", "/tmp/_k8e_run.sh":
        refused(grpc.StatusCode.INVALID_ARGUMENT, "/workspace", client.WriteFile, session_id=sid, path=path)
    # What older clients do with code of several lines.
    client.WriteFile(session_id=sid, path="/tmp/_k8e_run.py", content="n = 6\nprint(n * 7)\n")
    equal(client.Exec(session_id=sid, command="python3 /tmp/_k8e_run.py").stdout, "42\n")
    large = "0123456789abcde\n" * (2 * MIB)
    client.WriteFile(session_id=sid, path="large", content=large)
    assert client.ReadFile(session_id=sid, path="large").content == large, "32 MiB came back different"
    client.Exec(session_id=sid, command="cat large large large > larger")
    refused(grpc.StatusCode.FAILED_PRECONDITION, "k8e.v1 ReadFile", client.ReadFile, session_id=sid, path="larger")
    client.Exec(session_id=sid, command="rm large larger")
    listed = {one.path: one for one in client.ListFiles(session_id=sid).files}
    assert "/workspace/deep/er" not in listed, listed
    equal(listed["/workspace/link"].type, "symlink")
    one = listed["/workspace/deep/er/text.txt"]
    equal((one.type, one.size), ("file", len((content + "more").encode())))
    assert abs(one.modified - time.time()) < 3600, one
    equal(len(client.ListFiles(session_id=sid, since=int(time.time()) + 3600).files), 0)


WHEEL = """
import os, zipfile
os.makedirs('wheels', exist_ok=True)
info = 'miniature-2.0.dist-info/'
with zipfile.ZipFile('wheels/miniature-2.0-py3-none-any.whl', 'w') as wheel:
    wheel.writestr('miniature.py', 'size = 2')
    wheel.writestr(info + 'METADATA', 'Metadata-Version: 2.1\\nName: miniature\\nVersion: 2.0\\n')
    wheel.writestr(info + 'WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')
    wheel.writestr(info + 'RECORD', '')
"""


def pip(client, sid):
    client.WriteFile(session_id=sid, path="wheel.py", content=WHEEL)
    equal(client.Exec(session_id=sid, command="python3 wheel.py").exit_code, 0)
    done = client.PipInstall(session_id=sid, packages=["miniature>=1,<3"], deadline=150)
    assert done.exit_code == 0, done
    used = client.Exec(session_id=sid, command="cd /; python3 -c 'import miniature; print(miniature.size)'; ls /workspace/=*")
    equal(used.stdout, "2\n")
    failed = client.PipInstall(session_id=sid, packages=["no-such-package"], deadline=150)
    assert failed.exit_code != 0 and "no-such-package" in failed.output, failed
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    refused(invalid, "no packages specified", client.PipInstall, session_id=sid)
    refused(invalid, "invalid package name: -r", client.PipInstall, session_id=sid, packages=["-r"])
    refused(invalid, "invalid characters", client.PipInstall, session_id=sid, packages=["a;id"])


def history(client, sid):
    page = client.GetTranscript(session_id=sid, limit=1000)
    equal((page.offset, page.session_id), (0, sid))
    # Two streams, in whichever order they came.
    equal(sorted(page.output.splitlines()[:3]), ["/workspace", "hi", "oops"])
    rest = client.GetTranscript(session_id=sid, offset=page.next_offset)
    equal(rest.offset, page.next_offset)
    assert len(rest.output) <= 256 * 1024
    events = client.GetEvents(session_id=sid, limit=5)
    equal((events.returned, len(events.events), events.truncated), (5, 5, True))
    for event in events.events:
        equal(json.loads(event)["session_id"], sid)
    kinds = {json.loads(event)["event"] for event in client.GetEvents(session_id=sid).events}
    assert {"created", "run_started", "run_ended"} <= kinds, kinds


class Screen:
    """Reads a terminal in the background."""

    def __init__(self, client, terminal_id):
        self.said, self.exit = b"", None
        self.stream = client.TerminalStream(terminal_id=terminal_id, deadline=None)
        self.reader = concurrent.futures.ThreadPoolExecutor(1).submit(self.read)

    def read(self):
        try:
            for answer in self.stream:
                if answer.WhichOneof("frame") == "exit":
                    self.exit = answer.exit
                else:
                    self.said += answer.data
        except grpc.RpcError as error:
            equal(error.code(), grpc.StatusCode.CANCELLED)

    def expect(self, text):
        until(repr(text), lambda: text in self.said)


def terminals(client, sid):
    argv = ["sh", "-c", "stty -echo; echo $GREETING $MORE ready; exec sh"]
    made = client.CreateTerminal(session_id=sid, argv=argv, env={"MORE": "there"}, rows=30, cols=90)
    tid = made.terminal_id
    assert made.pid > 0 and tid.startswith("term-"), made
    screen = Screen(client, tid)
    screen.expect(b"hi there ready")
    equal(client.TerminalWrite(terminal_id=tid, data=b"stty size\n").ok, True)
    screen.expect(b"30 90")
    equal(client.TerminalResize(terminal_id=tid, rows=40, cols=100).ok, True)
    client.TerminalWrite(terminal_id=tid, data=b"stty size\n")
    screen.expect(b"40 100")
    assert client.TerminalForeground(terminal_id=tid).process_group_id > 0
    screen.stream.cancel()
    again = Screen(client, tid)
    again.expect(b"40 100")
    client.TerminalWrite(terminal_id=tid, data=b"trap 'echo got-it' INT; echo trap$((1+1)); read x\n")
    again.expect(b"trap2")
    interrupt = pb.TERMINAL_SIGNAL_INT
    assert client.TerminalSignal(terminal_id=tid, signal=interrupt).process_group_id > 0
    again.expect(b"got-it")
    client.TerminalWrite(terminal_id=tid, data=b"\nexit 5\n")
    again.reader.result(SOON)
    equal((again.exit.exit_code, again.exit.signal), (5, ""))
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    refused(invalid, "argv must be non-empty", client.CreateTerminal, session_id=sid)
    refused(invalid, "unsupported terminal signal", client.TerminalSignal, terminal_id=tid)
    refused(grpc.StatusCode.NOT_FOUND, "not found", client.TerminalWrite, terminal_id="term-nope", data=b"x")
    killed = client.CreateTerminal(session_id=sid, argv=["sleep", "1000"]).terminal_id
    screen = Screen(client, killed)
    client.TerminalSignal(terminal_id=killed, signal=pb.TERMINAL_SIGNAL_KILL)
    screen.reader.result(SOON)
    equal((screen.exit.exit_code, screen.exit.signal), (137, "SIGKILL"))


def many_terminals(client, sid):
    """Fifty at once, each with its own voice."""

    def one(n):
        made = client.CreateTerminal(session_id=sid, argv=["cat"])
        screen = Screen(client, made.terminal_id)
        client.TerminalWrite(terminal_id=made.terminal_id, data=f"voice-{n}.\n".encode())
        screen.expect(f"voice-{n}.\r\nvoice-{n}.".encode())
        assert screen.said.count(b"voice-") == 2, screen.said
        return made.terminal_id, screen

    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        open_now = list(pool.map(one, range(50)))
        ended = pool.map(lambda each: client.TerminalDestroy(terminal_id=each[0], grace_ms=2000).ok, open_now)
        equal(set(ended), {True})
    for _, screen in open_now:
        screen.stream.cancel()


def pausing(client, sid):
    """Nothing in it runs, nothing of it is lost."""
    failed = grpc.StatusCode.FAILED_PRECONDITION
    refused(failed, "is not paused", client.ResumeSession, session_id=sid)
    equal(client.PauseSession(session_id=sid).ok, True)
    equal(client.GetSession(session_id=sid).phase, "Paused")
    equal([one.session_id for one in client.ListSessions(phase="Paused").sessions], [sid])
    refused(failed, "is not active (phase=", client.PauseSession, session_id=sid)
    refused(failed, "paused", client.Exec, session_id=sid, command="true")
    equal(client.ResumeSession(session_id=sid).ok, True)
    equal(client.Exec(session_id=sid, command="echo back").stdout, "back\n")


def sub_agents(client, sid):
    """A child that runs commands, where its parent's files are."""
    client.WriteFile(session_id=sid, path="shared.txt", content="of the parent")
    child = client.RunSubAgent(parent_session_id=sid, agent_type="tester", workspace_path="/workspace/child").session_id
    ran = client.Exec(session_id=child, command="pwd; cat ../shared.txt; echo of the child > own.txt; exit 9")
    equal((ran.stdout, ran.exit_code), ("/workspace/child\nof the parent", 9))
    equal(client.ReadFile(session_id=sid, path="child/own.txt").content, "of the child\n")
    denied = grpc.StatusCode.PERMISSION_DENIED
    refused(denied, "max depth 1 reached", client.RunSubAgent, parent_session_id=child)
    refused(grpc.StatusCode.NOT_FOUND, "not found", client.RunSubAgent, parent_session_id="sess-nope")
    equal(client.DestroySession(session_id=child).ok, True)
    equal(client.Exec(session_id=sid, command="cat child/own.txt").stdout, "of the child\n")


def approvals(client, sid):
    """Who asks waits, and somebody else answers."""
    # Another key of the same principal. With neither key nor certificate nobody is let in.
    person = Client(metadata=[("authorization", "Bearer " + os.environ["SECOND_APIKEY"])])
    unauthenticated = grpc.StatusCode.UNAUTHENTICATED
    refused(unauthenticated, "k8e apikey create", Client().ListSessions)
    missing = grpc.StatusCode.NOT_FOUND
    for answer in [True, False]:
        asked = client.ConfirmAction(session_id=sid, action="drop the database")
        equal(asked.approved, False)
        denied = grpc.StatusCode.PERMISSION_DENIED
        refused(denied, "cannot be decided by who asked", client.ApproveAction, approval_id=asked.approval_id, approved=True)
        # Who stops waiting loses nothing.
        late = grpc.StatusCode.DEADLINE_EXCEEDED
        refused(late, "", client.ConfirmAction, session_id=sid, approval_id=asked.approval_id, deadline=0.3)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.ConfirmAction, session_id=sid, approval_id=asked.approval_id)
            equal(person.ApproveAction(approval_id=asked.approval_id, approved=answer, reason="because").ok, True)
            equal(waiting.result(SOON).approved, answer)
        twice = grpc.StatusCode.FAILED_PRECONDITION
        refused(twice, "already", person.ApproveAction, approval_id=asked.approval_id, approved=not answer)
    refused(missing, "not found", client.ConfirmAction, session_id=sid, approval_id="approval-nope")
    events = [json.loads(event) for event in client.GetEvents(session_id=sid).events]
    assert any("because" in json.dumps(event) for event in events), events


def snapshots(client, sid):
    """Names and what they stand for."""
    layers = [digit * 64 for digit in "0123456789abcdef"]
    put = client.SnapshotPut(name="base", layers=layers)
    equal((put.name, put.layers), ("base", 16))
    equal(list(client.SnapshotGet(name="base").layers), layers)
    equal(list(client.SnapshotList().names), ["base"])
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    refused(invalid, "name and layers required", client.SnapshotPut, name="base")
    refused(invalid, "", client.SnapshotPut, name="../../etc/passwd", layers=layers)
    refused(grpc.StatusCode.NOT_FOUND, "not found", client.SnapshotGet, name="other")


def exposed(client, sid):
    """A URL that opens a service on the sandbox's own loopback, for who has all of it."""
    serve = "mkdir -p site && echo hello > site/index.html && exec python3 -m http.server 8123 --bind 127.0.0.1 --directory site"
    run = client.Exec(session_id=sid, command=serve, background=True).run_id
    url = client.ExposeService(session_id=sid, port=8123).url
    assert f"/k8e/expose/{sid}/8123/" in url, url
    equal(client.ExposeService(session_id=sid, port=8123).url, url)

    def get(url):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor())
        try:
            with opener.open(url, timeout=SOON) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, b""

    until("the service", lambda: get(url) == (200, b"hello\n"))
    equal(get(url.split("?")[0])[0], 404)
    equal([(one.port, one.url) for one in client.ListExposed(session_id=sid).services], [(8123, url)])
    equal(client.UnexposeService(session_id=sid, port=8123).ok, True)
    equal(client.UnexposeService(session_id=sid, port=8123).ok, False)
    equal(get(url)[0], 404)
    equal(list(client.ListExposed(session_id=sid).services), [])
    refused(grpc.StatusCode.INVALID_ARGUMENT, "port must be in [1, 65535]", client.ExposeService, session_id=sid, port=0)
    equal(client.PollRun(run_id=run).status, "running")


def main():
    client = log_in()
    sid = sessions(client)
    parts = [commands, broken_off, streams, background, files, pip, history, terminals, many_terminals]
    for part in parts + [pausing, sub_agents, approvals, snapshots, exposed]:
        begun = time.monotonic()
        part(client, sid)
        print(f"{part.__name__}: {time.monotonic() - begun:.1f} s", flush=True)
    equal(client.DestroySession(session_id=sid).ok, True)
    refused(grpc.StatusCode.NOT_FOUND, f"session {sid} not found", client.Exec, session_id=sid, command="true")
    missing = {method.name for method in SERVICE.methods} - called
    equal(missing, set())
    print("every call was made")


main()
