// Watches and metrics with E2B's official JavaScript client against a k8e server.

import assert from 'node:assert'
import { createRequire } from 'node:module'

const require = createRequire(process.env.NODE_TOOLS + '/')
const { Sandbox, FileNotFoundError, InvalidArgumentError, NotFoundError } = require('e2b')

const raises = async (kind, call) => {
  try {
    await call()
  } catch (error) {
    assert(error instanceof kind, `${error.constructor.name}: ${error.message}`)
    return error
  }
  throw new Error(`no ${kind.name}`)
}

const sandbox = await Sandbox.create({ timeoutMs: 600_000 })
const run = (command) => sandbox.commands.run(command)

// Collects events; `until` resolves with those so far, when there is one of a name, without that.
const collector = () => {
  const seen = []
  let wake = () => {}
  const exited = {}
  exited.promise = new Promise((resolve) => (exited.resolve = resolve))
  return {
    seen,
    exited: exited.promise,
    onExit: exited.resolve,
    onEvent: (event) => {
      seen.push(event)
      wake()
    },
    until: async (name) => {
      while (!seen.some((event) => event.name === name)) await new Promise((resolve) => (wake = resolve))
      return seen.splice(0).filter((event) => event.name !== name).map((event) => `${event.type} ${event.name}`)
    },
  }
}

await sandbox.files.makeDir('dir/sub')
const first = collector()
const handle = await sandbox.files.watchDir('dir', first.onEvent, { recursive: true, timeoutMs: 0, onExit: first.onExit })
await run('cd dir; echo x > f; chmod 600 f; mv f sub/g; rm sub/g; touch end')
assert.deepEqual(await first.until('end'), [
  'create f',
  'write f',
  'chmod f',
  'rename f',
  'create sub/g',
  'remove sub/g',
])
await handle.stop()
await first.exited

const second = collector()
await sandbox.files.watchDir('dir', second.onEvent, { timeoutMs: 0, includeEntry: true, onExit: second.onExit })
await run('echo hello > dir/described; touch dir/sub/unseen; sleep 0.1; touch dir/end2')
while (!second.seen.some((event) => event.name === 'end2')) await new Promise((resolve) => setTimeout(resolve, 20))
const described = second.seen.find((event) => event.name === 'described')
assert.equal(described.entry.path, '/home/user/dir/described')
assert(!second.seen.some((event) => event.name.includes('unseen')))
await sandbox.files.remove('dir')
const ended = await second.exited
assert(ended instanceof NotFoundError, `${ended}`)

await raises(FileNotFoundError, () => sandbox.files.watchDir('missing', () => {}))
await raises(InvalidArgumentError, () => sandbox.files.watchDir('/etc/passwd', () => {}))

const [sample] = await sandbox.getMetrics()
assert(sample.memUsed > 0 && sample.memUsed <= sample.memTotal, JSON.stringify(sample))
assert(sample.diskUsed > 0 && sample.diskUsed < sample.diskTotal, JSON.stringify(sample))
assert(sample.cpuCount >= 1 && sample.cpuUsedPct >= 0)
assert.equal(await sandbox.kill(), true)
console.log('every call was made')
