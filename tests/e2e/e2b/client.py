"""Calls of E2B's official Python client (sync) against a k8e server, each with its result checked."""

import json
import os
import time
import urllib.error
import urllib.request

from e2b import (
    AuthenticationException,
    CommandExitException,
    NotFoundException,
    PtySize,
    Sandbox,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)
from e2b.exceptions import SandboxException

URL = os.environ["E2B_API_URL"]
OTHER = os.environ["OTHER_API_KEY"]


def raises(kind, call, has=""):
    try:
        call()
    except kind as error:
        assert has in str(error), error
        return error
    raise AssertionError(f"no {kind}")


def http(method, path, headers=None, data=None):
    """Status, and the body as JSON if it is."""
    request = urllib.request.Request(URL + path, method=method, headers=headers or {}, data=data)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")


def eventually(check):
    """Waits for something that another process does; the bound is only against hanging."""
    for _ in range(600):
        if check():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def lifecycle():
    sandbox = Sandbox.create(timeout=120, metadata={"a b": "c&d", "team": "x"}, envs={"GREETING": "hi"})
    assert sandbox.sandbox_id.isalnum(), sandbox.sandbox_id
    assert sandbox.is_running()
    info = sandbox.get_info()
    assert info.sandbox_id == sandbox.sandbox_id
    assert info.metadata == {"a b": "c&d", "team": "x"}, info.metadata
    assert info.template_id == "base" and info.state == SandboxState.RUNNING
    assert 100 < (info.end_at - info.started_at).total_seconds() < 130, info
    sandbox.set_timeout(600)
    info = Sandbox.get_info(sandbox.sandbox_id)
    assert 590 < (info.end_at - info.started_at).total_seconds() < 700, info
    other = Sandbox.create(metadata={"team": "y"})
    ids = [listed.sandbox_id for listed in Sandbox.list().next_items()]
    assert sandbox.sandbox_id in ids and other.sandbox_id in ids, ids
    assert ids.index(other.sandbox_id) < ids.index(sandbox.sandbox_id), "newest first"
    found = Sandbox.list(query=SandboxQuery(metadata={"a b": "c&d"})).next_items()
    assert [one.sandbox_id for one in found] == [sandbox.sandbox_id]
    pages = Sandbox.list(limit=1)
    first = pages.next_items()
    assert len(first) == 1 and pages.has_next
    second = pages.next_items()
    assert {first[0].sandbox_id, second[0].sandbox_id} == set(ids)
    again = Sandbox.connect(sandbox.sandbox_id)
    assert again.commands.run("echo $GREETING").stdout == "hi\n"
    assert other.kill() and not other.kill()
    assert not other.is_running()
    raises(Exception, lambda: other.commands.run("true"))
    raises(NotFoundException, lambda: Sandbox.connect(other.sandbox_id))
    raises(SandboxException, lambda: Sandbox.create(timeout=-1))
    raises(SandboxException, lambda: Sandbox.create(template="no-such-template"))
    short = Sandbox.create(timeout=1)
    eventually(lambda: not short.is_running())
    return sandbox


def commands(sandbox):
    run = sandbox.commands.run
    done = run("echo out; echo err >&2")
    assert (done.stdout, done.stderr, done.exit_code) == ("out\n", "err\n", 0), done
    error = raises(CommandExitException, lambda: run("echo partly; exit 7"))
    assert (error.exit_code, error.stdout) == (7, "partly\n")
    assert run("pwd").stdout == "/home/user\n"
    assert run("whoami").stdout == "user\n"
    assert run("whoami; echo $HOME", user="root").stdout == "root\n/root\n"
    assert run("pwd; echo $A", cwd="/tmp", envs={"A": "b c"}).stdout == "/tmp\nb c\n"
    assert run("echo $E2B_SANDBOX $E2B_SANDBOX_ID").stdout == f"true {sandbox.sandbox_id}\n"
    raises(SandboxException, lambda: run("true", cwd="/no/such"), "does not exist")
    raises(AuthenticationException, lambda: run("true", user="nobody"))
    lines = []
    run("for i in 1 2 3; do echo $i; done", on_stdout=lines.append)
    assert "".join(lines) == "1\n2\n3\n"
    assert len(run("head -c 3000000 /dev/zero | tr '\\0' x").stdout) == 3000000
    assert run("echo héllo ✓").stdout == "héllo ✓\n"
    raises(TimeoutException, lambda: run("sleep 60", timeout=1))
    eventually(lambda: not run("pgrep -x sleep || true").stdout.strip())

    cat = run("cat", background=True, stdin=True)
    sandbox.commands.send_stdin(cat.pid, "typed\n")
    assert cat.pid in [process.pid for process in sandbox.commands.list()]
    listed = [process for process in sandbox.commands.list() if process.pid == cat.pid][0]
    assert listed.cmd == "/bin/bash" and listed.args[-1] == "cat", listed
    sandbox.commands.close_stdin(cat.pid)
    assert cat.wait().stdout == "typed\n"

    sleeper = run("sleep 1000", background=True, timeout=0)
    assert sandbox.commands.kill(sleeper.pid)
    error = raises(CommandExitException, sleeper.wait)
    assert error.exit_code == -1, error.exit_code
    assert not sandbox.commands.kill(sleeper.pid)
    assert not sandbox.commands.kill(999999)

    late = run("while [ ! -e /tmp/go ]; do sleep 0.05; done; echo gone on; exit 3", background=True, timeout=0)
    late.disconnect()
    joined = sandbox.commands.connect(late.pid)
    run("touch /tmp/go")
    error = raises(CommandExitException, joined.wait)
    assert (error.exit_code, error.stdout) == (3, "gone on\n"), error
    raises(NotFoundException, lambda: sandbox.commands.connect(999999))


def terminals(sandbox):
    seen = bytearray()
    pty = sandbox.pty.create(size=PtySize(rows=24, cols=80))
    sandbox.pty.send_stdin(pty.pid, b"stty size; tty; echo d''one\n")
    sandbox.pty.resize(pty.pid, PtySize(rows=30, cols=100))
    sandbox.pty.send_stdin(pty.pid, b"stty size; exit 4\n")
    error = raises(CommandExitException, lambda: pty.wait(on_pty=seen.extend))
    assert error.exit_code == 4, error
    text = bytes(seen).decode()
    assert "done" in text and "30 100" in text, text
    pty = sandbox.pty.create(size=PtySize(rows=24, cols=80))
    assert sandbox.pty.kill(pty.pid)
    assert not sandbox.pty.kill(999999)


def files(sandbox):
    fs = sandbox.files
    written = fs.write("notes/a.txt", "text ✓")
    assert written.path == "/home/user/notes/a.txt", written
    assert fs.read("notes/a.txt") == "text ✓"
    assert fs.read("/home/user/notes/a.txt", format="bytes") == "text ✓".encode()
    assert b"".join(fs.read("notes/a.txt", format="stream")) == "text ✓".encode()
    info = fs.get_info("notes/a.txt")
    assert (info.owner, info.group, info.mode) == ("user", "user", 0o644), info
    assert info.size == len("text ✓".encode()) and info.permissions == "-rw-r--r--", info
    assert sandbox.commands.run("stat -c %U notes notes/a.txt").stdout == "user\nuser\n"
    fs.write("/root/r.txt", "x", user="root")
    assert fs.get_info("/root/r.txt", user="root").owner == "root"
    assert fs.write("empty", "") and fs.read("empty") == ""
    blob = os.urandom(5_000_000)
    fs.write("blob", blob)
    assert fs.read("blob", format="bytes") == blob
    many = fs.write_files([{"path": f"many/{n}", "data": str(n)} for n in range(5)])
    assert [entry.path for entry in many] == [f"/home/user/many/{n}" for n in range(5)]
    names = [entry.name for entry in fs.list("many")]
    assert names == ["0", "1", "2", "3", "4"], names
    with open(__file__, "rb") as own:
        fs.write("stream", own)
    assert fs.read("stream") == open(__file__).read()
    assert fs.exists("many/0") and not fs.exists("many/9")
    assert fs.make_dir("deep/er/est") and not fs.make_dir("deep/er/est")
    assert [entry.path for entry in fs.list("deep", depth=2)] == ["/home/user/deep/er", "/home/user/deep/er/est"]
    assert [entry.name for entry in fs.list("deep")] == ["er"]
    moved = fs.rename("many/0", "new/dir/zero")
    assert moved.path == "/home/user/new/dir/zero" and fs.read("new/dir/zero") == "0"
    sandbox.commands.run("ln -s a.txt notes/link; ln -s nowhere notes/broken")
    assert fs.read("notes/link") == "text ✓"
    link = fs.get_info("notes/link")
    assert link.symlink_target == "a.txt", link
    fs.remove("many")
    assert not fs.exists("many")
    fs.remove("many")
    raises(NotFoundException, lambda: fs.read("many/1"), "does not exist")
    raises(NotFoundException, lambda: fs.list("many"))
    raises(SandboxException, lambda: fs.list("blob"))
    raises(SandboxException, lambda: fs.read("notes"))
    raises(SandboxException, lambda: fs.write("notes", "x"))
    raises(SandboxException, lambda: fs.make_dir("blob"))
    assert "root:" in fs.read("../../../../etc/passwd"), "the sandbox's own, however it is written"


def signed_urls(sandbox):
    sandbox.files.write("signed file.txt", "by url")
    url = sandbox.download_url("signed file.txt", use_signature_expiration=60)
    with urllib.request.urlopen(url) as answer:
        assert answer.read() == b"by url"
    ranged = urllib.request.Request(url, headers={"Range": "bytes=3-5"})
    with urllib.request.urlopen(ranged) as answer:
        assert (answer.status, answer.read()) == (206, b"url")
    for wrong in [url.replace("signed", "sign"), url.replace("v1_", "v1_x"), url.split("&signature=")[0]]:
        status, _ = http("GET", wrong[len(URL):])
        assert status == 401, (wrong, status)


def ports(sandbox):
    script = "mkdir -p www && echo served > www/f && cd www && exec python3 -m http.server 8123 --bind 127.0.0.1"
    server = sandbox.commands.run(script, background=True, timeout=0)
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "8123"}
    eventually(lambda: http("GET", "/f", headers)[0] == 200)
    assert http("GET", "/f", headers) == (200, b"served\n")
    host = sandbox.get_host(8123)
    assert host.startswith(f"8123-{sandbox.sandbox_id}."), host
    assert http("GET", "/f", {"Host": host}) == (200, b"served\n")
    status, body = http("GET", "/", {**headers, "E2b-Sandbox-Port": "8124"})
    assert status == 502 and "port is not open" in body["message"] and body["port"] == 8124, body
    server.kill()


def unauthorized(sandbox):
    """Another key, another token, none: never data."""
    id = sandbox.sandbox_id
    theirs = Sandbox.create(api_key=OTHER)
    raises(NotFoundException, lambda: Sandbox.connect(id, api_key=OTHER))
    raises(NotFoundException, lambda: Sandbox.get_info(id, api_key=OTHER))
    raises(NotFoundException, lambda: Sandbox.set_timeout(id, 10, api_key=OTHER))
    raises(NotFoundException, lambda: Sandbox.pause(id, api_key=OTHER))
    assert not Sandbox.kill(id, api_key=OTHER)
    assert id not in [one.sandbox_id for one in Sandbox.list(api_key=OTHER).next_items()]
    raises(AuthenticationException, lambda: Sandbox.create(api_key="e2b_" + "0" * 64))
    raises(AuthenticationException, lambda: Sandbox.list(api_key="nonsense").next_items())
    base = {"E2b-Sandbox-Id": id, "E2b-Sandbox-Port": "49983", "Content-Type": "application/json"}
    token = theirs.connection_config.sandbox_headers["X-Access-Token"]
    for headers in [base, {**base, "X-Access-Token": token}, {**base, "X-Access-Token": ""}]:
        for path in ["/process.Process/List", "/filesystem.Filesystem/Stat", "/envs", "/files?path=/etc/passwd"]:
            method = "POST" if path.startswith(("/process", "/filesystem")) else "GET"
            status, _ = http(method, path, headers, b"{}" if method == "POST" else None)
            assert status == 401, (path, status)
    unknown = {**base, "E2b-Sandbox-Id": "i00000000000000000000"}
    status, body = http("POST", "/process.Process/List", unknown, b"{}")
    assert status == 502 and "was not found" in body["message"], body
    for path, headers, expected in [
        ("/init", base, 404),
        ("/files?path=/etc/passwd", {}, 401),
        ("/sandboxes", {}, 401),
        ("/process.Process/List", {"E2b-Sandbox-Id": id}, 400),
        ("/x", {**base, "E2b-Sandbox-Id": "../../etc"}, 400),
    ]:
        assert http("GET", path, headers)[0] == expected, path
    own = {**base, "X-Access-Token": sandbox.connection_config.sandbox_headers["X-Access-Token"]}
    assert http("POST", "/process.Process/List", {**own, "Content-Type": "text/plain"}, b"{}")[0] == 415
    assert http("POST", "/process.Process/List", own, b"{}")[0] == 200
    assert http("POST", "/filesystem.Filesystem/Stat", own, b"{not json")[0] == 400
    half = {**own, "Content-Type": "application/connect+json"}
    status, body = http("POST", "/process.Process/Start", half, b"\x00\x00\x00\x10\x00{")
    assert status == 200 and b"invalid_argument" in body, body
    assert theirs.kill()


def pausing(sandbox):
    sandbox.files.write("kept", "over the pause")
    counter = sandbox.commands.run("while sleep 0.1; do :; done", background=True, timeout=0)
    assert sandbox.pause() and not sandbox.pause()
    assert Sandbox.get_info(sandbox.sandbox_id).state == SandboxState.PAUSED
    paused = Sandbox.list(query=SandboxQuery(state=[SandboxState.PAUSED])).next_items()
    assert [one.sandbox_id for one in paused] == [sandbox.sandbox_id]
    assert not sandbox.is_running()
    sandbox.connect(timeout=300)
    assert sandbox.is_running() and sandbox.files.read("kept") == "over the pause"
    assert counter.pid in [process.pid for process in sandbox.commands.list()]
    assert sandbox.commands.kill(counter.pid)


def forking(sandbox):
    sandbox.files.write("/workspace/kept", "over the fork")
    forks = sandbox.fork(count=2, timeout=120)
    assert all(isinstance(fork, Sandbox) for fork in forks), forks
    assert len({fork.sandbox_id for fork in forks} | {sandbox.sandbox_id}) == 3
    for fork in forks:
        assert fork.files.read("/workspace/kept") == "over the fork"
        assert fork.commands.run("echo $E2B_SANDBOX_ID").stdout.strip() == fork.sandbox_id
        fork.files.write("/workspace/kept", "apart")
        assert fork.kill()
    assert sandbox.files.read("/workspace/kept") == "over the fork"
    raises(NotFoundException, lambda: Sandbox.fork(sandbox.sandbox_id, api_key=OTHER))


sandbox = lifecycle()
commands(sandbox)
terminals(sandbox)
files(sandbox)
signed_urls(sandbox)
ports(sandbox)
unauthorized(sandbox)
pausing(sandbox)
forking(sandbox)
assert sandbox.kill()
print("every call was made", flush=True)
# Without the interpreter's own end, in which threads of the client's HTTP library may crash.
os._exit(0)
