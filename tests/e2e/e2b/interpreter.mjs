// Calls of E2B's official JavaScript code interpreter against a k8e server, each with its result checked.

import assert from 'node:assert'
import { createRequire } from 'node:module'

const require = createRequire(process.env.NODE_TOOLS + '/')
const { Sandbox, NotFoundError, TimeoutError, SandboxError } = require('@e2b/code-interpreter')

const raises = async (kind, call) => {
  try {
    await call()
  } catch (error) {
    assert(error instanceof kind, `${error.constructor.name}: ${error.message}`)
    return error
  }
  throw new Error(`no ${kind.name}`)
}

const sandbox = await Sandbox.create({ timeoutMs: 300_000, envs: { GREETING: 'hi' } })
const run = (code, options) => sandbox.runCode(code, options)

const first = await run('x = 20\nx + 1')
assert.equal(first.text, '21')
assert.equal(first.executionCount, 1)
assert.equal(first.error, undefined)
assert.equal((await run('x + 2')).text, '22')
const output = await run("import sys\nprint('out')\nprint('err', file=sys.stderr)")
assert.deepEqual([output.logs.stdout, output.logs.stderr], [['out\n'], ['err\n']])
assert.deepEqual((await run("print('é\\u2028😀' * 20_000)")).logs.stdout.join(''), 'é\u2028😀'.repeat(20_000) + '\n')
const shown = await run(
  "class Shown:\n    def _repr_html_(self): return '<b>bold</b>'\n    def _repr_png_(self): return b'picture'\nShown()"
)
assert.equal(shown.results[0].html, '<b>bold</b>')
assert.equal(Buffer.from(shown.results[0].png, 'base64').toString(), 'picture')
assert.equal(shown.results[0].isMainResult, true)
assert.deepEqual((await run("{'answer': [42]}")).results[0].json, { answer: [42] })
const failed = await run('1 / 0')
assert.deepEqual([failed.error.name, failed.error.value], ['ZeroDivisionError', 'division by zero'])
assert.match(failed.error.traceback, /line 1/)
const seen = []
await run("import sys\nprint('1'); print('2', file=sys.stderr); display(3); raise ValueError('4')", {
  onStdout: (message) => seen.push(message.line),
  onStderr: (message) => seen.push(message.line),
  onResult: (result) => seen.push(result.text),
  onError: (error) => seen.push(error.name),
})
assert.deepEqual([...seen].sort(), ['1\n', '2\n', '3', 'ValueError'])
assert.equal((await run("import os; os.environ['OWN']", { envs: { OWN: 'own' } })).text, 'own')
assert.equal((await run("os.environ.get('OWN'), os.environ['GREETING']")).text, "(None, 'hi')")

const context = await sandbox.createCodeContext({ cwd: '/tmp', language: 'python' })
assert.deepEqual([context.language, context.cwd], ['python', '/tmp'])
assert.equal((await run("import os; x = 'own'; os.getcwd()", { context })).text, '/tmp')
assert.equal((await run('x')).text, '20')
assert((await sandbox.listCodeContexts()).some((one) => one.id === context.id))
await sandbox.restartCodeContext(context)
assert.equal((await run('x', { context })).error.name, 'NameError')
await sandbox.removeCodeContext(context)
await raises(NotFoundError, () => run('1', { context }))
await raises(SandboxError, () => sandbox.createCodeContext({ language: 'r' }))

assert.equal((await run('const a = [1, 2]; a.length', { language: 'js' })).text, '2')
assert.equal((await run('await Promise.resolve(a[1] + 1)', { language: 'javascript' })).text, '3')
assert.deepEqual((await run('echo $GREETING', { language: 'bash' })).logs.stdout, ['hi\n'])

await raises(TimeoutError, () => run('import time\nwhile True: time.sleep(0.01)', { timeoutMs: 1000 }))
assert.equal((await run('x')).text, '20')
await sandbox.pause()
await sandbox.connect({ timeoutMs: 300_000 })
assert.equal((await run('x')).text, '20')
assert.equal(await sandbox.kill(), true)
await raises(TimeoutError, () => run('1'))
console.log('every call was made')
// The client keeps a timer of 60 seconds.
process.exit(0)
