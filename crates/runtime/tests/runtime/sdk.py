"""Commands and files through agent-sandbox's client, over both of its APIs. Ports: legacy, REST, gRPC."""

import asyncio
import io
import os
import sys

from k8s_agent_sandbox.async_connector import AsyncSandboxConnector
from k8s_agent_sandbox.commands.async_command_executor import AsyncCommandExecutor
from k8s_agent_sandbox.commands.command_executor import CommandExecutor
from k8s_agent_sandbox.connector import SandboxConnector
from k8s_agent_sandbox.exceptions import SandboxRequestError
from k8s_agent_sandbox.files.async_filesystem import AsyncFilesystem
from k8s_agent_sandbox.files.filesystem import Filesystem
from k8s_agent_sandbox.models import (
    SandboxdInClusterConnectionConfig,
    SandboxDirectConnectionConfig,
)

LEGACY, REST, GRPC = (int(port) for port in sys.argv[1:])
BLOB = os.urandom(3_000_000)


class NoKubernetes:
    """Whatever asks for the API server has asked too much."""


def refused(status, call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except SandboxRequestError as error:
        assert error.status_code == status, (error.status_code, status)
        return
    raise AssertionError(f"not refused with {status}")


def layers(config, **connector):
    connector = SandboxConnector("a-sandbox", "default", config, NoKubernetes(), **connector)
    return CommandExecutor(connector, None, "test"), Filesystem(connector, None, "test")


def files_work(files):
    files.write("notes/ünï code.txt", "hello")
    assert files.read("notes/ünï code.txt") == b"hello"
    files.write("notes/blob", io.BytesIO(BLOB))
    assert files.read("notes/blob") == BLOB
    out = io.BytesIO()
    assert files.read_to("notes/blob", out) == len(BLOB) and out.getvalue() == BLOB
    listed = {entry.name: entry for entry in files.list("notes")}
    assert set(listed) == {"blob", "ünï code.txt"}, listed
    assert listed["blob"].size == len(BLOB) and listed["blob"].type == "file"
    assert [entry.type for entry in files.list(".") if entry.name == "notes"] == ["directory"]
    assert files.exists("notes/blob") and files.exists("notes") and not files.exists("none")
    refused(404, files.read, "none")
    refused(403, files.read, "../out", allow_unsafe_paths=True)
    refused(403, files.write, "../out", b"x", allow_unsafe_paths=True)


def legacy():
    config = SandboxDirectConnectionConfig(api_url=f"http://127.0.0.1:{LEGACY}")
    commands, files = layers(config, get_pod_ip=lambda: "127.0.0.1")
    result = commands.run("sh -c 'echo $SANDBOX_COLOUR; echo oops >&2; exit 3'")
    assert (result.stdout, result.stderr, result.exit_code) == ("blue\n", "oops\n", 3), result
    assert commands.run("no-such-program").exit_code == 1
    slow = commands.run("sleep 100", command_timeout=0.5)
    assert slow.timed_out and slow.exit_code == 124, slow
    files_work(files)


def sandboxd():
    config = SandboxdInClusterConnectionConfig(
        mode="in-cluster-pod-ip", rest_port=REST, grpc_port=GRPC
    )
    commands, files = layers(config, get_pod_ip=lambda: "127.0.0.1")
    result = commands.run("echo $SANDBOX_COLOUR $MORE | cat; exit 3", env={"MORE": "than that"})
    assert (result.stdout, result.exit_code) == ("blue than that\n", 3), result
    slow = commands.run("sleep 100", command_timeout=0.5)
    assert slow.timed_out and slow.exit_code == 124, slow
    files_work(files)
    assert commands.run("wc -c < blob", cwd="notes").stdout.strip() == str(len(BLOB))
    assert {entry.mode for entry in files.list("notes")} == {"0644"}
    refused(409, files.delete, "notes")
    files.delete("notes", recursive=True)
    assert not files.exists("notes")
    try:
        commands.run("true", cwd="../..")
    except RuntimeError as error:
        assert "PERMISSION_DENIED" in str(error), error
    else:
        raise AssertionError("a working directory outside the root")


async def sandboxd_async():
    config = SandboxdInClusterConnectionConfig(
        mode="in-cluster-pod-ip", rest_port=REST, grpc_port=GRPC
    )

    async def pod_ip():
        return "127.0.0.1"

    connector = AsyncSandboxConnector(
        "a-sandbox", "default", config, NoKubernetes(), get_pod_ip=pod_ip
    )
    commands = AsyncCommandExecutor(connector, None, "test")
    files = AsyncFilesystem(connector, None, "test")
    result = await commands.run("echo $((6 * 7))")
    assert (result.stdout, result.exit_code) == ("42\n", 0), result
    await files.write("async.txt", b"hello")
    assert await files.read("async.txt") == b"hello"
    await connector.close()


legacy()
sandboxd()
asyncio.run(sandboxd_async())
