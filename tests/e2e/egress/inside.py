# What programs inside a sandbox are made of that try to get out. Each says that it tried, and
# ESCAPED when it got what it wanted; what arrived is for the receiving side to say.
import errno, os, socket, ssl, struct, sys, time

SECRET = b"k8e-secret"
GATEWAY = "198.18.0.1"
WAIT = 1.5


def tried(*what):
    print("tried", *what, flush=True)


def escaped(*what):
    print("ESCAPED", *what, flush=True)


def say(address, port, data=b"", wait=WAIT, family=socket.AF_INET, pieces=None):
    """Connects, says something, and returns what was answered; nothing when nobody did."""
    tried(address, port)
    s = socket.socket(family, socket.SOCK_STREAM)
    s.settimeout(wait)
    try:
        s.connect((address, port))
        for piece in pieces or [data]:
            s.sendall(piece)
            if pieces:
                time.sleep(0.02)
        return s.recv(65536)
    except OSError:
        return b""
    finally:
        s.close()


def refused(answer):
    """Whether the gate says no, or somebody does: what arrived is for the receiving side to say."""
    return not answer or (answer.startswith(b"HTTP/1.") and answer[8:10] == b" 4")


def reach(address, port, data=SECRET, **more):
    """Nobody may answer but the gate."""
    answer = say(address, port, data, **more)
    if not refused(answer):
        escaped(address, port, answer[:200])


def get(host, path="/k8e-secret", version="1.1", more=""):
    return f"GET {path} HTTP/{version}\r\nHost: {host}\r\n{more}\r\n".encode()


def u16(data):
    return struct.pack(">H", len(data)) + data


def extension(kind, data):
    return struct.pack(">H", kind) + u16(data)


def server_name(*names):
    names = [n if isinstance(n, bytes) else n.encode() for n in names]
    return extension(0, u16(b"".join(b"\0" + u16(n) for n in names)))


def hello_body(*extensions):
    """A ClientHello that any server would answer."""
    exts = b"".join(extensions)
    exts += extension(10, u16(struct.pack(">2H", 0x1D, 0x17)))
    exts += extension(13, u16(struct.pack(">3H", 0x0403, 0x0804, 0x0401)))
    exts += extension(43, b"\x04\x03\x04\x03\x03")
    exts += extension(11, b"\x01\x00")
    exts += extension(51, u16(struct.pack(">H", 0x1D) + u16(os.urandom(32))))
    ciphers = struct.pack(">5H", 0x1301, 0x1302, 0x1303, 0xC02B, 0xC02F)
    body = b"\x03\x03" + os.urandom(32) + b"\x20" + os.urandom(32) + u16(ciphers) + b"\x01\x00" + u16(exts)
    return b"\x01" + struct.pack(">I", len(body))[1:] + body


def records(handshake, size=16384):
    parts = [handshake[i : i + size] for i in range(0, len(handshake), size)]
    return b"".join(b"\x16\x03\x01" + u16(part) for part in parts)


def hello(*names, more=b"", size=16384):
    first = server_name(*names) if names else b""
    return records(hello_body(first, more), size)


def question(name, kind=1, flags=0x0100, number=7, cls=1, tail=b""):
    labels = name if isinstance(name, bytes) else b"".join(bytes([len(l)]) + l.encode() for l in name.split(".") if l) + b"\0"
    return struct.pack(">6H", number, flags, 1, 0, 0, 0) + labels + struct.pack(">HH", kind, cls) + tail


def ask_udp(server, message, wait=WAIT):
    tried("udp", server)
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.settimeout(wait)
    try:
        s.sendto(message, (server, 53))
        return s.recv(65535)
    except OSError:
        return b""
    finally:
        s.close()


def ask_tcp(server, message, port=53, wrap=None, wait=WAIT):
    tried("tcp", server, port)
    try:
        with socket.create_connection((server, port), wait) as s:
            s.settimeout(wait)
            if wrap is not None:
                context = ssl._create_unverified_context()
                s = context.wrap_socket(s, server_hostname=wrap or None)
            s.sendall(u16(message))
            return s.recv(65535)[2:]
    except OSError:
        return b""


def answers(message):
    """How many records an answer has; nothing that is no answer has any."""
    return struct.unpack(">H", message[6:8])[0] if len(message) >= 12 else 0


def resolve(name):
    try:
        return socket.gethostbyname_ex(name)[2]
    except OSError:
        return []


def datagram(address, port, data=SECRET, family=socket.AF_INET, wait=0.5, prepare=None):
    """Sends one, and nobody may answer it."""
    tried("udp", address, port)
    try:
        s = socket.socket(family, socket.SOCK_DGRAM)
        s.settimeout(wait)
        if prepare:
            prepare(s)
        s.sendto(data, (address, port))
        answer = s.recv(65536)
        escaped(address, port, answer[:200])
    except OSError:
        pass
