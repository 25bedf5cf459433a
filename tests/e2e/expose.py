# A service as people write them: it listens on loopback only. It says nothing but what is asked for.
import hashlib, http.server, base64, sys

class Service(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def say(self, body, **headers):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/ws":
            key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            self.send_response(101)
            self.send_header("Upgrade", "websocket")
            self.send_header("Connection", "Upgrade")
            accept = base64.b64encode(hashlib.sha1(key.encode()).digest())
            self.send_header("Sec-WebSocket-Accept", accept.decode())
            self.end_headers()
            while data := self.rfile.read1(65536):
                self.wfile.write(data)
            self.close_connection = True
        elif self.path == "/events":
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            # The next only when somebody says that the last one came.
            for n in range(3):
                self.wfile.write(b"data: %d\n\n" % n)
                open(f"/tmp/event-{n}", "w").close()
                import os, time
                while not os.path.exists(f"/tmp/seen-{n}"):
                    time.sleep(0.01)
        elif self.path.startswith("/down/"):
            left = int(self.path.split("/")[2])
            self.send_response(200)
            self.send_header("Content-Length", str(left))
            self.end_headers()
            chunk = b"x" * 1048576
            while left:
                left -= self.wfile.write(chunk[:left])
        elif self.path == "/hostile":
            self.say(b"", Set_Cookie="a=b; Domain=localhost; Path=/", Clear_Site_Data='"*"')
        else:
            self.say(repr((self.path, sorted(self.headers.keys()), self.headers["Host"])).encode())

    def do_POST(self):
        left, sum = int(self.headers["Content-Length"]), hashlib.sha256()
        count = left
        while left:
            data = self.rfile.read(min(left, 1048576))
            left -= len(data)
            sum.update(data)
        self.say(f"{count} {sum.hexdigest()}".encode())

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Service).serve_forever()
