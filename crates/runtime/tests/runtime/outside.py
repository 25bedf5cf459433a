"""Fills a runtime with connections from outside, and has one more wait.

Arguments: the runtime's program, a directory for its files. Runs in a network namespace of its own."""

import atexit
import os
import socket
import subprocess
import sys

# As many as the server takes at once (`CONNECTIONS_MAX`).
CONNECTIONS_MAX = 256
SERVER = ("192.0.2.1", 8080)
REQUEST = b"GET /v1/health HTTP/1.1\r\nhost: 192.0.2.1\r\n\r\n"


def connect():
    stream = socket.socket()
    stream.bind(("192.0.2.2", 0))
    stream.settimeout(60)
    stream.connect(SERVER)
    return stream


def ask(stream):
    stream.sendall(REQUEST)
    answer = stream.recv(65536)
    assert answer.startswith(b"HTTP/1.1 200"), answer


program, root = sys.argv[1:]
runtime = subprocess.Popen(
    [program, "-listen-host=192.0.2.1", "-legacy-port=8888", "-rest-port=8080", "-grpc-port=9090",
     "-http-idle-timeout=10m", "--root-dir=" + os.path.join(root, "workspace")],
    env=dict(os.environ, SANDBOX_BASE_DIR=os.path.join(root, "app")),
    stderr=subprocess.PIPE,
)
atexit.register(runtime.kill)
runtime.stderr.readline()  # Written when it listens.

served = [connect() for _ in range(CONNECTIONS_MAX)]
for stream in served:
    ask(stream)

# The kernel makes the connection and takes the request; the server has not seen it.
waiting = connect()
waiting.sendall(REQUEST)
waiting.settimeout(0.5)
try:
    sys.exit("one too many was answered: %r" % waiting.recv(100))
except TimeoutError:
    pass

# All others are still served meanwhile.
for stream in served:
    ask(stream)
served.pop().close()
waiting.settimeout(60)
answer = waiting.recv(65536)
assert answer.startswith(b"HTTP/1.1 200"), answer
print("waited its turn")
