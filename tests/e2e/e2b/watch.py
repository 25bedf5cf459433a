"""Watches and metrics with E2B's official Python client, sync and async, against a k8e server."""

import asyncio
import json
import os
import time
import urllib.error
import urllib.request

from e2b import AsyncSandbox, FilesystemEventType, NotFoundException, Sandbox
from e2b.exceptions import InvalidArgumentException, RateLimitException, SandboxException

URL = os.environ["E2B_API_URL"]
CREATE, WRITE, REMOVE, RENAME, CHMOD = (
    FilesystemEventType.CREATE,
    FilesystemEventType.WRITE,
    FilesystemEventType.REMOVE,
    FilesystemEventType.RENAME,
    FilesystemEventType.CHMOD,
)


def raises(kind, call, has=""):
    try:
        call()
    except kind as error:
        assert has in str(error), error
        return error
    raise AssertionError(f"no {kind}")


def until(handle, name):
    """Events up to one of this name; the bound is only against hanging."""
    seen = []
    for _ in range(600):
        for event in handle.get_new_events():
            seen.append(event)
        if any(event.name == name for event in seen):
            return seen
        time.sleep(0.05)
    raise AssertionError(f"{name} does not come: {seen}")


def pairs(events):
    return [(event.type, event.name) for event in events]


def polled(sandbox):
    fs, run = sandbox.files, sandbox.commands.run
    fs.make_dir("watched/sub")
    handle = fs.watch_dir("watched")
    assert handle.get_new_events() == []
    fs.write("watched/by-call", "x")
    run("cd watched; echo x > f; chmod 600 f; mv f g; rm g; touch sub/unseen; touch end")
    seen = pairs(until(handle, "end"))
    for event in [(CREATE, "f"), (WRITE, "f"), (CHMOD, "f"), (RENAME, "f"), (CREATE, "g"), (REMOVE, "g")]:
        assert event in seen, (event, seen)
    assert any(name == "by-call" for _, name in seen), seen
    assert not any("unseen" in name for _, name in seen), seen
    handle.stop()
    raises(SandboxException, handle.get_new_events)
    raises(NotFoundException, handle.stop)

    handle = fs.watch_dir("watched", recursive=True, include_entry=True)
    run("mkdir -p watched/new/deep; echo hello > watched/new/deep/file; touch watched/end2")
    seen = until(handle, "end2")
    run("echo hello > watched/new/deep/late; rm watched/new/deep/file; touch watched/end3")
    seen += until(handle, "end3")
    assert (CREATE, "new/deep/file") in pairs(seen), seen
    late = [event for event in seen if event.name == "new/deep/late" and event.entry]
    assert late and late[-1].entry.path == "/home/user/watched/new/deep/late", late
    assert all(event.entry is None for event in seen if event.type == REMOVE), seen
    fs.remove("watched")
    error = None
    for _ in range(600):
        try:
            handle.get_new_events()
        except NotFoundException as ended:
            error = ended
            break
        time.sleep(0.05)
    assert error, "the end of the directory is not reported"
    handle.stop()


def refusals(sandbox):
    fs = sandbox.files
    raises(NotFoundException, lambda: fs.watch_dir("missing"))
    fs.write("a-file", "x")
    raises(InvalidArgumentException, lambda: fs.watch_dir("a-file"))
    fs.make_dir("many")
    handles = [fs.watch_dir("many") for _ in range(8)]
    raises(RateLimitException, lambda: fs.watch_dir("many"), "at most 8")
    # Another sandbox does not see them.
    other = Sandbox.create()
    stolen = other.files.watch_dir("/tmp")
    stolen._watcher_id = handles[0]._watcher_id
    raises(NotFoundException, stolen.get_new_events)
    raises(NotFoundException, stolen.stop)
    assert other.kill()
    for handle in handles:
        handle.stop()
    fs.watch_dir("many").stop()


def lost(sandbox):
    """More events than are kept, while nobody fetches them: an error, after those that are there."""
    sandbox.files.make_dir("flood")
    handle = sandbox.files.watch_dir("flood")
    flood = "import os\nfor n in range(60000):\n  os.close(os.open(f'flood/{n:0200}', os.O_CREAT))\n  os.unlink(f'flood/{n:0200}')\n"
    sandbox.files.write("flood.py", flood)
    sandbox.commands.run("python3 flood.py", timeout=120)
    count = 0
    for _ in range(600):
        try:
            count += len(handle.get_new_events())
        except SandboxException as error:
            assert "lost" in str(error), error
            break
        time.sleep(0.05)
    else:
        raise AssertionError("no error")
    assert 0 < count < 120000, count
    handle.stop()


def metrics(sandbox):
    sample = sandbox.get_metrics()[-1]
    assert sample.cpu_count >= 1 and sample.cpu_used_pct >= 0, sample
    assert 0 < sample.mem_used <= sample.mem_total and sample.mem_cache >= 0, sample
    assert 0 < sample.disk_used < sample.disk_total, sample
    assert Sandbox.get_metrics(sandbox.sandbox_id)[0].mem_total == sample.mem_total
    raises(NotFoundException, lambda: Sandbox.get_metrics(sandbox.sandbox_id, api_key=os.environ["OTHER_API_KEY"]))
    headers = {
        "E2b-Sandbox-Id": sandbox.sandbox_id,
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": sandbox.connection_config.sandbox_headers["X-Access-Token"],
    }
    with urllib.request.urlopen(urllib.request.Request(URL + "/metrics", headers=headers)) as answer:
        own = json.loads(answer.read())
    assert own["mem_total"] == sample.mem_total and own["disk_total"] == sample.disk_total, own
    try:
        urllib.request.urlopen(urllib.request.Request(URL + "/metrics", headers={**headers, "X-Access-Token": "x"}))
        raise AssertionError("metrics without the token")
    except urllib.error.HTTPError as error:
        assert error.code == 401, error


async def streamed():
    sandbox = await AsyncSandbox.create()
    await sandbox.files.make_dir("dir/sub")
    events, ended = asyncio.Queue(), asyncio.Queue()
    handle = await sandbox.files.watch_dir(
        "dir", on_event=events.put_nowait, on_exit=ended.put_nowait, recursive=True, timeout=0
    )

    async def upto(name):
        seen = []
        while not seen or seen[-1].name != name:
            seen.append(await asyncio.wait_for(events.get(), 60))
        return pairs(seen)

    await sandbox.commands.run("cd dir; echo x > f; mv f sub/g; touch end")
    seen = await upto("end")
    assert seen == [(CREATE, "f"), (WRITE, "f"), (RENAME, "f"), (CREATE, "sub/g"), (CREATE, "end")], seen
    await handle.stop()
    assert await asyncio.wait_for(ended.get(), 60) is None

    # The end of the directory and of the time are errors.
    await sandbox.files.watch_dir("dir/sub", on_event=events.put_nowait, on_exit=ended.put_nowait, timeout=0)
    await sandbox.files.remove("dir")
    error = await asyncio.wait_for(ended.get(), 60)
    assert isinstance(error, NotFoundException), error
    await sandbox.files.watch_dir("/tmp", on_event=events.put_nowait, on_exit=ended.put_nowait, timeout=1)
    error = await asyncio.wait_for(ended.get(), 60)
    assert error is not None and "timeout" in str(error).lower(), error
    for path, kind in [("missing", NotFoundException), ("/etc/passwd", InvalidArgumentException)]:
        try:
            await sandbox.files.watch_dir(path, on_event=print)
            raise AssertionError("watched")
        except kind:
            pass
    assert (await sandbox.get_metrics())[0].mem_total > 0
    await sandbox.kill()


sandbox = Sandbox.create(timeout=600)
polled(sandbox)
refusals(sandbox)
lost(sandbox)
metrics(sandbox)
assert sandbox.kill()
raises(NotFoundException, lambda: Sandbox.get_metrics(sandbox.sandbox_id))
asyncio.run(streamed())
print("every call was made", flush=True)
# Without the interpreter's own end, in which threads of the client's HTTP library may crash.
os._exit(0)
