// Calls of E2B's official JavaScript client against a k8e server, each with its result checked.

import assert from 'node:assert'
import { createRequire } from 'node:module'

const require = createRequire(process.env.NODE_TOOLS + '/')
const { Sandbox, CommandExitError, NotFoundError, AuthenticationError, TimeoutError } = require('e2b')

const raises = async (kind, call) => {
  try {
    await call()
  } catch (error) {
    assert(error instanceof kind, `${error.constructor.name}: ${error.message}`)
    return error
  }
  throw new Error(`no ${kind.name}`)
}

const sandbox = await Sandbox.create({ timeoutMs: 120_000, metadata: { who: 'js test' }, envs: { GREETING: 'hi' } })
assert.match(sandbox.sandboxId, /^[a-z0-9]+$/)
assert.equal(await sandbox.isRunning(), true)
const info = await sandbox.getInfo()
assert.deepEqual(info.metadata, { who: 'js test' })
await sandbox.setTimeout(600_000)
const listed = await Sandbox.list({ query: { metadata: { who: 'js test' } } }).nextItems()
assert.deepEqual(listed.map((one) => one.sandboxId), [sandbox.sandboxId])

const run = (command, options) => sandbox.commands.run(command, options)
assert.equal((await run('echo $GREETING')).stdout, 'hi\n')
assert.equal((await run('whoami; pwd')).stdout, 'user\n/home/user\n')
assert.equal((await run('whoami', { user: 'root' })).stdout, 'root\n')
assert.equal((await run('pwd', { cwd: '/tmp' })).stdout, '/tmp\n')
const failed = await raises(CommandExitError, () => run('echo bad >&2; exit 7'))
assert.equal(failed.exitCode, 7)
assert.equal(failed.stderr, 'bad\n')
await raises(TimeoutError, () => run('sleep 60', { timeoutMs: 1000 }))
await raises(AuthenticationError, () => run('true', { user: 'nobody' }))
assert.equal((await run("head -c 3000000 /dev/zero | tr '\\0' x")).stdout.length, 3_000_000)
const cat = await run('cat', { background: true, stdin: true })
await sandbox.commands.sendStdin(cat.pid, 'typed\n')
assert((await sandbox.commands.list()).some((process) => process.pid === cat.pid))
await sandbox.commands.closeStdin(cat.pid)
assert.equal((await cat.wait()).stdout, 'typed\n')
const sleeper = await run('sleep 1000', { background: true, timeoutMs: 0 })
assert.equal(await sandbox.commands.kill(sleeper.pid), true)
await raises(CommandExitError, () => sleeper.wait())
assert.equal(await sandbox.commands.kill(999999), false)
await raises(NotFoundError, () => sandbox.commands.connect(999999))

let shown = ''
const pty = await sandbox.pty.create({ rows: 24, cols: 80, onData: (data) => (shown += Buffer.from(data).toString()) })
await sandbox.pty.resize(pty.pid, { rows: 30, cols: 100 })
await sandbox.pty.sendInput(pty.pid, Buffer.from('stty size; exit 4\n'))
assert.equal((await raises(CommandExitError, () => pty.wait())).exitCode, 4)
assert(shown.includes('30 100'), shown)

await sandbox.files.write('notes/a.txt', 'text ✓')
assert.equal(await sandbox.files.read('notes/a.txt'), 'text ✓')
const bytes = await sandbox.files.read('notes/a.txt', { format: 'bytes' })
assert.equal(Buffer.from(bytes).toString(), 'text ✓')
assert.deepEqual((await sandbox.files.list('notes')).map((entry) => entry.name), ['a.txt'])
assert.equal(await sandbox.files.exists('nothing'), false)
assert.equal(await sandbox.files.makeDir('d/e'), true)
assert.equal(await sandbox.files.makeDir('d/e'), false)
assert.equal((await sandbox.files.rename('notes/a.txt', 'd/b.txt')).path, '/home/user/d/b.txt')
await sandbox.files.remove('d')
assert.equal(await sandbox.files.exists('d'), false)
await raises(NotFoundError, () => sandbox.files.read('nothing'))
await sandbox.files.write('signed file', 'by url')
const url = await sandbox.downloadUrl('signed file', { useSignatureExpiration: 60 })
assert.equal(await (await fetch(url)).text(), 'by url')
assert.equal((await fetch(url.replace('v1_', 'v1_x'))).status, 401)

await raises(NotFoundError, () => Sandbox.connect(sandbox.sandboxId, { apiKey: process.env.OTHER_API_KEY }))
await raises(AuthenticationError, () => Sandbox.create({ apiKey: 'e2b_' + '0'.repeat(64) }))
assert.equal(await sandbox.pause(), true)
assert.equal(await sandbox.isRunning(), false)
await sandbox.connect()
assert.equal((await run('echo again')).stdout, 'again\n')
assert.equal(await sandbox.kill(), true)
assert.equal(await sandbox.kill(), false)
console.log('every call was made')
