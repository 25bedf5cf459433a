"""Python kernel of k8e's code interpreter: runs cells in one namespace, and reports output, results and errors.

Messages are JSON objects, one per line. They come on the standard input that the process was started with and leave on
its standard output; both are duplicated first, so that what cells and their child processes write to descriptors 1 and 2
goes through pipes and becomes messages, and their standard input is empty. Standard library only, Python 3.8 or newer;
matplotlib, pandas and IPython are used when a cell has imported them or could.
"""

import ast
import base64
import builtins
import codecs
import importlib.machinery
import importlib.util
import inspect
import io
import json
import linecache
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
import types

KERNEL_PID = os.getpid()
KERNEL_FILE = (lambda: 0).__code__.co_filename
CHUNK_BYTES = 65536
# What a pipe holds: at the end of a cell no more than this can be on its way.
PIPE_BYTES = 65536
TRACEBACK_CHARS_MAX = 200_000

MIME_METHODS = [
    ("text/html", "_repr_html_"),
    ("text/markdown", "_repr_markdown_"),
    ("image/svg+xml", "_repr_svg_"),
    ("image/png", "_repr_png_"),
    ("image/jpeg", "_repr_jpeg_"),
    ("application/pdf", "_repr_pdf_"),
    ("text/latex", "_repr_latex_"),
    ("application/json", "_repr_json_"),
    ("application/javascript", "_repr_javascript_"),
]


class StdinNotImplementedError(RuntimeError):
    pass


def clean(text):
    """Without lone surrogates, which JSON cannot carry."""
    return text.encode("utf-8", "replace").decode("utf-8")


class Channel:
    """Messages to the server, and the pipes that output goes through."""

    def __init__(self):
        self.requests = os.fdopen(os.dup(0), "rb")
        self.replies = os.dup(1)
        self.marks = os.dup(2)
        self.message_bytes_max = 1 << 20
        # Held while messages are written. The signal handler waits for it to be free: half a line would be the end.
        self.lock = threading.RLock()
        self.protected = 0
        self.interrupted = False
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.close(empty)
        self.pipes = [self._pipe(1, "stdout"), self._pipe(2, "stderr")]
        sys.stdin = open(0, encoding="utf-8", closefd=False)
        sys.stdout = self._text(1, False)
        sys.stderr = self._text(2, True)
        threading.Thread(target=self._pump, daemon=True, name="k8e output").start()

    @staticmethod
    def _pipe(fd, name):
        reader, writer = os.pipe()
        os.dup2(writer, fd)
        os.close(writer)
        os.set_blocking(reader, False)
        return reader, name, codecs.getincrementaldecoder("utf-8")("replace")

    @staticmethod
    def _text(fd, write_through):
        raw = io.FileIO(fd, "w", closefd=False)
        buffered = io.BufferedWriter(raw)
        return io.TextIOWrapper(
            buffered,
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
            write_through=write_through,
        )

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self.protected += 1
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()
        if threading.current_thread() is threading.main_thread():
            self.protected -= 1
            if not self.protected and self.interrupted:
                self.interrupted = False
                raise KeyboardInterrupt

    def send(self, kind, **fields):
        line = json.dumps({"type": kind, **fields}).encode("ascii") + b"\n"
        with self:
            self.write_all(self.replies, line)

    @staticmethod
    def write_all(fd, data):
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    def _pump(self):
        poll = select.poll()
        for reader, _, _ in self.pipes:
            poll.register(reader, select.POLLIN)
        while True:
            poll.poll()
            with self.lock:
                self._forward(CHUNK_BYTES)

    def _forward(self, most):
        for reader, name, decoder in self.pipes:
            left = most
            while left > 0:
                try:
                    data = os.read(reader, min(left, CHUNK_BYTES))
                except BlockingIOError:
                    break
                if not data:
                    break
                left -= len(data)
                text = decoder.decode(data)
                if text:
                    self.send(name, text=text)

    def flush(self):
        """Sends all that was written so far."""
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                pass
        with self:
            self._forward(PIPE_BYTES)


CHANNEL = None


def json_text(value):
    """As JSON, or none if it cannot be."""
    try:
        return clean(json.dumps(value, default=str, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return None


def mime_value(mime, value):
    """A value as text: bytes in base64, JSON types as JSON."""
    if value is None:
        return None
    if mime == "application/json" or mime.endswith("+json") or mime.startswith("e2b/"):
        return value if isinstance(value, str) and mime.startswith("e2b/") else json_text(value)
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode("ascii")
    return clean(value if isinstance(value, str) else str(value))


def plain(value):
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__name__}: its repr() failed: {type(error).__name__}: {error}>"


FORMATTER = []


def ipython_format(value):
    """What IPython makes of it, where there is IPython."""
    if not FORMATTER:
        FORMATTER.append(None)
        try:
            if importlib.util.find_spec("IPython"):
                from IPython.core.formatters import DisplayFormatter

                FORMATTER[0] = DisplayFormatter()
        except Exception:
            pass
    if FORMATTER[0] is None:
        return {}
    return FORMATTER[0].format(value)[0]


def is_figure(value):
    figure = sys.modules.get("matplotlib.figure")
    return figure is not None and isinstance(value, figure.Figure)


def figure_bundle(figure):
    png = io.BytesIO()
    figure.savefig(png, format="png", bbox_inches="tight")
    bundle = {"text/plain": plain(figure), "image/png": png.getvalue()}
    try:
        chart = figure_chart(figure)  # noqa: F821 (charts.py)
        if chart is not None:
            bundle["e2b/chart"] = json_text(chart)
    except Exception:
        # A figure without its data is still a figure.
        pass
    return bundle


def bundle(value):
    """A value as texts by MIME type."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return {"text/plain": clean(plain(value))}
    found = {}
    if is_figure(value):
        found = figure_bundle(value)
    elif not isinstance(value, type):
        try:
            found.update(ipython_format(value))
        except Exception:
            pass
        method = getattr(value, "_repr_mimebundle_", None)
        if callable(method):
            try:
                made = method(include=None, exclude=None)
                found.update(made[0] if isinstance(made, tuple) else made or {})
            except Exception:
                pass
        for mime, name in MIME_METHODS:
            method = getattr(value, name, None)
            if mime not in found and callable(method):
                try:
                    made = method()
                except Exception:
                    continue
                found[mime] = made[0] if isinstance(made, tuple) else made
        if isinstance(value, (dict, list)) and "application/json" not in found:
            try:
                found["application/json"] = json.loads(json.dumps(value, allow_nan=False))
            except (TypeError, ValueError, RecursionError):
                pass
        pandas = sys.modules.get("pandas")
        if pandas is not None and isinstance(value, getattr(pandas, "DataFrame", ())):
            found["e2b/data"] = json_text(value.to_dict(orient="list"))
    found.setdefault("text/plain", plain(value))
    texts = ((str(mime), mime_value(str(mime), made)) for mime, made in found.items())
    return {mime: text for mime, text in texts if text is not None}


def publish(texts, main=False):
    """Sends a result; what is too large for a message is left out, the largest first."""
    CHANNEL.flush()
    room = CHANNEL.message_bytes_max - 4096
    size = {mime: len(json.dumps(text)) for mime, text in texts.items()}
    while sum(size.values()) > room and size:
        largest = max(size, key=size.get)
        print(
            f"a result of {size.pop(largest)} bytes ({largest}) was left out: "
            f"at most {room} are sent; write it to a file",
            file=sys.stderr,
        )
        del texts[largest]
    CHANNEL.send("result", main=main, data=texts)


def display(*values, raw=False, **_):
    """Shows values, each as a result."""
    for value in values:
        if raw and isinstance(value, dict):
            publish({str(mime): mime_value(str(mime), made) or "" for mime, made in value.items()})
        else:
            publish(bundle(value))


def show_figures(done=()):
    """Shows the open figures of matplotlib, and closes them."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None or not hasattr(pyplot, "get_fignums"):
        return
    for number in pyplot.get_fignums():
        figure = pyplot.figure(number)
        try:
            if not any(figure is other for other in done):
                publish(bundle(figure))
        finally:
            pyplot.close(figure)


def forget_figures():
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None and hasattr(pyplot, "close"):
        pyplot.close("all")


def patch_pyplot(module):
    module.show = lambda *_, **__: show_figures()


def patch_ipython(module):
    module.display = display
    module.publish_display_data = lambda data, *_, **__: display(data, raw=True)
    module.clear_output = lambda *_, **__: None


class ImportHook:
    """Changes modules right after their import."""

    patches = {"matplotlib.pyplot": patch_pyplot, "IPython.core.display_functions": patch_ipython}

    @classmethod
    def find_spec(cls, name, path=None, _target=None):
        patch = cls.patches.get(name)
        if patch is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


def no_input(prompt="", /):
    raise StdinNotImplementedError(
        "input() has nobody to ask here: pass the value as a variable, a file or an environment variable"
    )


def shell(command):
    """A line that begins with `!`, or `%pip`."""
    subprocess.run(command, shell=True, check=False)


def without_magics(code):
    """Lines of a notebook that are no Python: `!command`, `%pip install x`, `%matplotlib inline`."""
    lines = []
    for line in code.split("\n"):
        text = line.lstrip()
        indent = line[: len(line) - len(text)]
        if text.startswith("!"):
            line = f"{indent}__import__('__main__').__k8e_shell__({text[1:]!r})"
        elif text.startswith(("%pip ", "%conda ")):
            program = f"{sys.executable} -m pip" if text.startswith("%pip") else "conda"
            line = f"{indent}__import__('__main__').__k8e_shell__({program + text[text.index(' ') :]!r})"
        elif text.startswith(("%matplotlib", "%load_ext", "%config")):
            line = f"{indent}pass"
        lines.append(line)
    return "\n".join(lines)


class Kernel:
    def __init__(self):
        main = types.ModuleType("__main__")
        main.__k8e_shell__ = shell
        main.display = display
        builtins.display = display
        builtins.input = no_input
        sys.modules["__main__"] = main
        sys.meta_path.insert(0, ImportHook)
        sys.argv = [""]
        self.names = main.__dict__
        self.names["__builtins__"] = builtins
        self.count = 0
        self.loop = None
        self.running = False
        sys.excepthook = sys.__excepthook__

    def on_interrupt(self, *_):
        if not self.running:
            return
        if CHANNEL.protected:
            CHANNEL.interrupted = True
            return
        raise KeyboardInterrupt

    def parse(self, code, name):
        try:
            return ast.parse(code, name)
        except SyntaxError as error:
            plainer = without_magics(code)
            if plainer == code:
                raise error.with_traceback(None) from None
            return ast.parse(plainer, name)

    def evaluate(self, tree, name, mode):
        code = compile(tree, name, mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        value = eval(code, self.names)
        if code.co_flags & inspect.CO_COROUTINE:
            return self.wait(value)
        return value

    def wait(self, coroutine):
        import asyncio

        if self.loop is None or self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        task = self.loop.create_task(coroutine)
        try:
            return self.loop.run_until_complete(task)
        except BaseException:
            if not task.done():
                task.cancel()
                try:
                    self.loop.run_until_complete(task)
                except BaseException:
                    pass
            raise

    def run_cell(self, code):
        self.count += 1
        name = f"<cell {self.count}>"
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        tree = self.parse(code, name)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = ast.Expression(tree.body.pop().value)
        if tree.body:
            self.evaluate(tree, name, "exec")
        value = None if last is None else self.evaluate(last, name, "eval")
        shown = []
        if value is not None and not code.rstrip().endswith(";"):
            self.names["_"] = value
            publish(bundle(value), main=True)
            shown = [value] if is_figure(value) else []
        show_figures(shown)

    def report(self, error):
        """Sends an error, without the frames of this file."""
        try:
            described = traceback.TracebackException.from_exception(error)
            own = [frame for frame in described.stack if frame.filename != KERNEL_FILE]
            described.stack = traceback.StackSummary.from_list(own)
            text = "".join(described.format())
        except Exception:
            text = type(error).__name__
        try:
            value = str(error)
        except Exception as failed:
            value = f"its str() failed: {type(failed).__name__}"
        if len(text) > TRACEBACK_CHARS_MAX:
            half = TRACEBACK_CHARS_MAX // 2
            text = f"{text[:half]}\n...\n{text[-half:]}"
        CHANNEL.flush()
        CHANNEL.send(
            "error",
            name=clean(type(error).__name__),
            value=clean(value[:TRACEBACK_CHARS_MAX]),
            traceback=clean(text),
        )

    def execute(self, request):
        signal.signal(signal.SIGINT, self.on_interrupt)
        CHANNEL.message_bytes_max = request["message_bytes_max"]
        before = {name: os.environ.get(name) for name in request["env"]}
        os.environ.update(request["env"])
        error = None
        try:
            CHANNEL.interrupted = False
            self.running = True
            self.run_cell(request["code"])
        except BaseException as raised:
            error = raised
        # One that arrives from here on is too late.
        self.running = False
        if os.getpid() != KERNEL_PID:
            # A child of the cell's os.fork() that came to the end of the cell.
            os._exit(0 if error is None else 1)
        if error is not None:
            self.report(error)
            try:
                # What a failed cell has drawn so far is not a result of the next one.
                forget_figures()
            except Exception:
                pass
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        CHANNEL.flush()
        del error
        self.end(request["id"])

    def end(self, id):
        CHANNEL.send("end", id=id)
        CHANNEL.write_all(CHANNEL.marks, b"\0k8e " + id.encode("ascii") + b"\n")

    def serve(self):
        signal.signal(signal.SIGINT, self.on_interrupt)
        self.end("ready")
        for line in CHANNEL.requests:
            request = json.loads(line)
            # An interrupt is a signal as well, and that is enough.
            if "code" in request:
                self.execute(request)


if __name__ == "__main__":
    CHANNEL = Channel()
    KERNEL = Kernel()
    KERNEL.serve()
    os._exit(0)
