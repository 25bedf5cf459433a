"""Calls of E2B's official Python code interpreter (sync and async) against a k8e server, each with its result checked."""

import asyncio
import base64
import json
import os
import time
import urllib.error
import urllib.request

from e2b import NotFoundException, TimeoutException
from e2b.exceptions import SandboxException
from e2b_code_interpreter import AsyncSandbox, Sandbox

URL = os.environ["E2B_API_URL"]


def raises(kind, call, has=""):
    try:
        call()
    except kind as error:
        assert has in str(error), error
        return error
    raise AssertionError(f"no {kind}")


def http(method, path, headers, data=None):
    request = urllib.request.Request(URL + path, method=method, headers=headers, data=data)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def results(sandbox):
    run = sandbox.run_code
    names = [(context.language, context.cwd) for context in sandbox.list_code_contexts()]
    assert names == [("python", "/home/user"), ("javascript", "/home/user")], names
    done = run("x = 20\nx + 1")
    assert (done.text, done.execution_count, done.error) == ("21", 1, None), done
    assert run("x + 2").text == "22"
    assert run("'it is text'").text == "it is text"
    assert run("y = 1").results == []
    done = run("print('out')\nimport sys\nprint('err', file=sys.stderr)")
    assert (done.logs.stdout, done.logs.stderr, done.results) == (["out\n"], ["err\n"], []), done
    assert "".join(run("import os\nos.system('echo child; echo error >&2');").logs.stdout) == "child\n"
    assert run("'h\\u00e9llo \\u2028 \\U0001f600'").text == "héllo \\u2028 😀"
    assert "".join(run("print('a\\u0085\\u2028b\\U0001f600')").logs.stdout) == "a\u0085\u2028b😀\n"
    done = run(
        "class Shown:\n"
        "    def _repr_html_(self): return '<b>bold</b>'\n"
        "    def _repr_png_(self): return b'picture'\n"
        "    def _repr_markdown_(self): return '# head'\n"
        "display(Shown())\n"
        "{'answer': [42]}"
    )
    shown, main = done.results
    assert (shown.html, shown.markdown, shown.is_main_result) == ("<b>bold</b>", "# head", False), shown
    assert base64.b64decode(shown.png) == b"picture"
    assert main.json == {"answer": [42]} and main.is_main_result, main
    lines, errors, seen, failures = [], [], [], []
    run(
        "import sys\nprint('1'); print('2', file=sys.stderr); display(3); raise ValueError('four')",
        on_stdout=lambda message: lines.append(message.line),
        on_stderr=lambda message: errors.append(message.line),
        on_result=lambda result: seen.append(result.text),
        on_error=lambda error: failures.append(error.name),
    )
    assert (lines, errors, seen, failures) == (["1\n"], ["2\n"], ["3"], ["ValueError"])
    error = run("def divide():\n    return 1 / 0\ndivide()").error
    assert (error.name, error.value) == ("ZeroDivisionError", "division by zero"), error
    assert "line 2, in divide" in error.traceback and "kernel" not in error.traceback, error.traceback
    assert run("x =").error.name == "SyntaxError"
    assert "nobody to ask" in run("input('name?')").error.value
    assert run("import asyncio\nawait asyncio.sleep(0.01)\n'awaited'").text == "awaited"
    assert run("import sys; sys.exit(3)").error.name == "SystemExit"
    assert run("x").text == "20", "errors keep the variables"
    assert "".join(run("!echo from a shell").logs.stdout) == "from a shell\n"
    big = run("print('z' * 3_000_000)")
    assert len("".join(big.logs.stdout)) == 3_000_001
    assert run("import os\nos.getcwd(), os.environ['USER' if 'USER' in os.environ else 'LOGNAME']").text == "('/home/user', 'user')"


def environment(sandbox):
    run = sandbox.run_code
    assert run("import os; os.environ['GREETING']").text == "hi"
    assert run("os.environ['GREETING'], os.environ['OWN']", envs={"GREETING": "other", "OWN": "1"}).text == "('other', '1')"
    assert run("os.environ['GREETING'], os.environ.get('OWN')").text == "('hi', None)"
    bash = "echo $GREETING-$OWN"
    assert run(bash, language="bash", envs={"GREETING": "a 'b'", "OWN": "1"}).logs.stdout == ["a 'b'-1\n"]
    assert run(bash, language="bash").logs.stdout == ["hi-\n"]
    script = "[process.env.GREETING, process.env.OWN ?? null]"
    assert run(script, language="js", envs={"OWN": "1"}).results[0].json == ["hi", "1"]
    assert run(script, language="js").results[0].json == ["hi", None]


def contexts(sandbox):
    sandbox.commands.run("mkdir -p /tmp/there")
    made = sandbox.create_code_context(cwd="/tmp/there")
    assert (made.language, made.cwd) == ("python", "/tmp/there")
    assert sandbox.run_code("import os; x = 'own'; os.getcwd()", context=made).text == "/tmp/there"
    assert sandbox.run_code("x").text == "20", "the default context has its own variables"
    assert sandbox.run_code("x", context=made).text == "own"
    assert made.id in [context.id for context in sandbox.list_code_contexts()]
    sandbox.restart_code_context(made)
    assert sandbox.run_code("x", context=made).error.name == "NameError"
    assert sandbox.run_code("import os; os.getcwd()", context=made).text == "/tmp/there"
    sandbox.remove_code_context(made.id)
    assert made.id not in [context.id for context in sandbox.list_code_contexts()]
    raises(NotFoundException, lambda: sandbox.run_code("1", context=made))
    raises(NotFoundException, lambda: sandbox.remove_code_context(made))
    raises(NotFoundException, lambda: sandbox.restart_code_context("no such"))
    raises(SandboxException, lambda: sandbox.create_code_context(cwd="/no/such"), "does not exist")
    raises(SandboxException, lambda: sandbox.create_code_context(language="r"), "python, javascript")
    raises(SandboxException, lambda: sandbox.run_code("1", language="java"))


def languages(sandbox):
    js = lambda code: sandbox.run_code(code, language="javascript")
    assert js("const a = 1; a + 1").text == "2"
    assert js("const a = 5; console.log('out', a); console.error('err'); a").text == "5", "declared again"
    done = js("console.log('out', a); console.error('err')")
    assert (done.logs.stdout, done.logs.stderr) == (["out 5\n"], ["err\n"]), done
    assert js("await new Promise((done) => setTimeout(() => done(7), 10))").text == "7"
    assert js("({ answer: [42] })").results[0].json == {"answer": [42]}
    assert js("import { EOL } from 'node:os'\nEOL.length").text == "1"
    error = js("function fails() { throw new TypeError('no') }\nfails()").error
    assert (error.name, error.value) == ("TypeError", "no") and "fails" in error.traceback, error
    assert js("a").text == "5"
    raised = sandbox.run_code("const n: number = 2; n", language="typescript")
    assert raised.text == "2" or "22.13" in raised.error.value, raised
    bash = lambda code: sandbox.run_code(code, language="bash")
    assert bash("v=kept; cd /tmp; f() { echo \"it's $1\"; }").error is None
    done = bash("echo $v; pwd; f here; echo bad >&2; false")
    assert "".join(done.logs.stdout) == "kept\n/tmp\nit's here\n", done
    assert done.logs.stderr == ["bad\n"], done
    assert bash("cat; read line; echo \"[$line]\"").logs.stdout == ["[]\n"], "standard input is empty"
    error = bash("exit 3").error
    assert error.name == "UnexpectedEndOfExecution" and "code 3" in error.value, error
    assert bash("echo [$v]").logs.stdout == ["[]\n"], "a new shell"


def interrupts(sandbox):
    endless = {
        "python": ("state = 'kept'", "import time\nwhile True: time.sleep(0.01)", "state"),
        "javascript": ("const state = 'kept'", "for (;;) {}", "state"),
        "bash": ("state=kept", "while true; do sleep 0.1; done", "echo $state"),
    }
    for language, (before, forever, after) in endless.items():
        run = lambda code, **options: sandbox.run_code(code, language=language, **options)
        run(before)
        raises(TimeoutException, lambda: run(forever, timeout=1))
        done = run(after)
        assert "kept" in (done.text or "".join(done.logs.stdout)), (language, done)
    # Printing for ever ends by itself.
    error = sandbox.run_code("while True: print('x' * 100_000)").error
    assert error.name == "OutputLimitExceeded", error
    assert sandbox.run_code("state").text == "kept"
    # A client that leaves while its code prints.
    raises(TimeoutException, lambda: sandbox.run_code("import time\nwhile True: print('y'); time.sleep(0.01)", timeout=1))
    assert sandbox.run_code("state").text == "kept"


def deaths(sandbox):
    error = sandbox.run_code("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").error
    assert error.name == "UnexpectedEndOfExecution" and "signal 9" in error.value, error
    assert sandbox.run_code("'state' in globals()").text == "False", "a new kernel"
    error = sandbox.run_code("hog = []\nwhile True: hog.append(b'x' * 10_000_000)").error
    # The kernel is killed, or told that there is no more.
    assert "memory limit" in error.value or error.name == "MemoryError", error
    assert sandbox.run_code("1 + 1").text == "2"
    assert sandbox.is_running()


def unauthorized(sandbox):
    base = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49999", "Content-Type": "application/json"}
    own = {**base, "X-Access-Token": sandbox.connection_config.sandbox_headers["X-Access-Token"]}
    code = json.dumps({"code": "1"}).encode()
    assert http("POST", "/execute", base, code)[0] == 401
    assert http("POST", "/execute", {**base, "X-Access-Token": "0" * 64}, code)[0] == 401
    assert http("GET", "/contexts", {**base, "X-Access-Token": "0" * 64})[0] == 401
    assert http("POST", "/execute", {**own, "E2b-Sandbox-Id": "i00000000000000000000"}, code)[0] == 502
    status, lines = http("POST", "/execute", own, code)
    kinds = [json.loads(line)["type"] for line in lines.splitlines()]
    assert status == 200 and kinds == ["number_of_executions", "result", "end_of_execution"], lines
    assert http("GET", "/health", base) == (200, "OK")
    both = json.dumps({"code": "1", "context_id": "a", "language": "python"}).encode()
    for data, expected in [(b"{", 400), (b"{}", 400), (both, 400), (b'{"code":"1","context_id":"a"}', 404)]:
        assert http("POST", "/execute", own, data)[0] == expected, data
    large = json.dumps({"code": "#" * 3_000_000}).encode()
    assert http("POST", "/execute", own, large)[0] == 400
    assert http("GET", "/no/such", own)[0] == 404


def limits(sandbox):
    made = []
    error = None
    while error is None and len(made) < 100:
        try:
            made.append(sandbox.create_code_context(language="bash"))
        except SandboxException as raised:
            error = raised
    assert "remove one" in str(error), error
    for context in made:
        sandbox.remove_code_context(context)


def pausing(sandbox):
    sandbox.run_code("state = 'over the pause'")
    sandbox.pause()
    sandbox.connect(timeout=300)
    assert sandbox.run_code("state").text == "over the pause"


async def asynchronous():
    sandbox = await AsyncSandbox.create(timeout=300)
    lines = []
    done = await sandbox.run_code("print('hi')\n6 * 7", on_stdout=lambda message: lines.append(message.line))
    assert (done.text, lines) == ("42", ["hi\n"])
    first = await sandbox.create_code_context()
    second = await sandbox.create_code_context()
    # Contexts are independent: the one waits for what the other does.
    waits = "import os, time\nwhile not os.path.exists('/tmp/met'): time.sleep(0.01)\n'met'"
    waiting = asyncio.create_task(sandbox.run_code(waits, context=first))
    meets = sandbox.run_code("open('/tmp/met', 'w').close()\n'meets'", context=second)
    assert [(await meets).text, (await waiting).text] == ["meets", "met"]
    # Executions of one context have their turns.
    both = [sandbox.run_code("turns = globals().get('turns', 0) + 1; turns", context=first) for _ in range(4)]
    assert sorted([done.text for done in await asyncio.gather(*both)]) == ["1", "2", "3", "4"]
    await sandbox.restart_code_context(first)
    assert (await sandbox.run_code("'turns' in globals()", context=first)).text == "False"
    await sandbox.remove_code_context(first)
    assert first.id not in [context.id for context in await sandbox.list_code_contexts()]
    assert await sandbox.kill()


sandbox = Sandbox.create(timeout=300, envs={"GREETING": "hi"})
for test in [results, environment, contexts, languages, interrupts, unauthorized, limits, pausing, deaths]:
    began = time.monotonic()
    test(sandbox)
    print(f"{test.__name__}: {time.monotonic() - began:.1f} s")
assert sandbox.kill()
raises(TimeoutException, lambda: sandbox.run_code("1"))
asyncio.run(asynchronous())
print("every call was made", flush=True)
# Without the interpreter's own end, in which threads of the client's HTTP library may crash.
os._exit(0)
