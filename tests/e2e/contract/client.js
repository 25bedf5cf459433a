// Drives every call of sandbox.v1 with grpc-js, and our proto as proto-loader reads it.
'use strict';

const assert = require('node:assert/strict');
const fs = require('node:fs');
const tools = process.env.NODE_TOOLS;
const grpc = require(require.resolve('@grpc/grpc-js', { paths: [tools] }));
const loader = require(require.resolve('@grpc/proto-loader', { paths: [tools] }));

const MIB = 1024 * 1024;
const SOON = 60_000;
const { status } = grpc;
const options = { keepCase: true, longs: Number, enums: String, defaults: true, oneofs: true };
const definition = loader.loadSync('sandbox/v1/sandbox.proto', {
  ...options,
  includeDirs: [process.env.PROTO],
});
const Service = grpc.loadPackageDefinition(definition).sandbox.v1.SandboxService;
const RPCS = Object.values(Service.service).map((method) => method.path.split('/').pop());
const called = new Set();
const read = (name) => fs.readFileSync(process.env[name]);
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

// A stub that remembers what was called. Its messages are as large as grpc-js takes by itself.
class Client {
  constructor(key, cert, bearer) {
    const credentials = grpc.credentials.createSsl(read('CA'), key, cert);
    this.stub = new Service(process.env.ENDPOINT, credentials);
    this.bearer = bearer;
  }

  metadata(more = {}) {
    const metadata = new grpc.Metadata();
    if (this.bearer) metadata.set('authorization', `Bearer ${this.bearer}`);
    for (const [name, value] of Object.entries(more)) metadata.set(name, value);
    return metadata;
  }

  call(rpc, request = {}, deadline = SOON) {
    called.add(rpc);
    const until = { deadline: Date.now() + deadline };
    return new Promise((done, failed) => {
      const answered = (error, answer) => (error ? failed(error) : done(answer));
      this.stub[rpc](request, this.metadata(), until, answered);
    });
  }

  stream(rpc, request, more) {
    called.add(rpc);
    return this.stub[rpc](request, this.metadata(more));
  }
}

async function refused(code, text, call) {
  const error = await call.then(
    (answer) => assert.fail(`was not refused: ${JSON.stringify(answer)}`),
    (error) => error,
  );
  assert.equal(error.code, code, error.stack);
  assert.ok(error.details.includes(text), `${error.details} does not say ${text}`);
}

async function until(what, check) {
  const deadline = Date.now() + SOON;
  while (!(await check())) {
    assert.ok(Date.now() < deadline, `${what} did not come`);
    await pause(50);
  }
}

// A certificate for an API key, and a client that has nothing else.
async function logIn() {
  const withKey = new Client(null, null, process.env.APIKEY);
  const csr = read('CSR').toString();
  const granted = await withKey.call('Login', { csr, device_name: 'contract' });
  assert.equal(granted.ca_cert, read('CA').toString());
  assert.equal(granted.valid_days, 90);
  const client = new Client(read('KEY'), Buffer.from(granted.cert));
  const { cert } = await client.call('GetCACert');
  assert.ok(cert.startsWith('-----BEGIN CERTIFICATE-----'), cert);
  return client;
}

async function sessions(client) {
  const probe = { session_id: 'healthcheck-probe-noop' };
  await refused(status.NOT_FOUND, 'not found', client.call('DestroySession', probe));
  const runtime_class = process.env.RUNTIME;
  const env = { GREETING: 'hi' };
  const made = await client.call('CreateSession', { tenant_id: 'contract', runtime_class, env });
  const sid = made.session_id;
  assert.match(sid, /^sess-/);
  const shown = await client.call('GetSession', { session_id: sid });
  assert.equal(shown.phase, 'Active');
  assert.deepEqual([shown.tenant_id, shown.env_keys], ['contract', ['GREETING']]);
  const listed = await client.call('ListSessions');
  assert.deepEqual(listed.sessions.map((one) => one.session_id), [sid]);
  const hosts = ['example.org'];
  const updated = await client.call('UpdateAllowedHosts', { session_id: sid, hosts });
  assert.deepEqual(updated.hosts, hosts);
  await refused(status.INVALID_ARGUMENT, 'env: ', client.call('CreateSession', { env: { '': '' } }));
  return sid;
}

async function commands(client, sid) {
  const exec = (command, more) => client.call('Exec', { session_id: sid, command, ...more });
  const done = await exec('echo $GREETING; echo oops >&2; exit 7', { language: 'bash' });
  assert.deepEqual([done.stdout, done.stderr, done.exit_code], ['hi\n', 'oops\n', 7]);
  assert.deepEqual([done.status, done.session_id, done.language], ['completed', sid, 'bash']);
  const slow = await exec('sleep 1000', { timeout: 1 });
  assert.equal(slow.status, 'timed_out');
  const flood = await exec("head -c 100000000 /dev/zero | tr '\\0' x >&2", { timeout: 50 });
  assert.deepEqual([flood.exit_code, flood.stderr.length, flood.truncated], [0, MIB, true]);
  // Bytes that are no text grow; the answer still fits what grpc-js takes.
  const noise = await exec("head -c 3000000 /dev/zero | tr '\\0' '\\377' | tee /dev/stderr");
  assert.ok(noise.truncated && Buffer.byteLength(noise.stdout) <= MIB);
  const gone = client.call('Exec', { session_id: 'gone', command: 'true' });
  await refused(status.NOT_FOUND, 'session gone not found', gone);
}

async function running(client, sid, what) {
  const { processes } = await client.call('GetProcesses', { session_id: sid });
  return processes.some((process) => process.comm.startsWith(what));
}

// Who leaves takes his command along.
async function brokenOff(client, sid) {
  const command = 'cp /bin/sleep /tmp/deadliner; cp /bin/sleep /tmp/cancelled';
  await client.call('Exec', { session_id: sid, command });
  const late = { session_id: sid, command: '/tmp/deadliner 1000', timeout: 500 };
  await refused(status.DEADLINE_EXCEEDED, '', client.call('Exec', late, 1500));
  await until('the end of the command', async () => !(await running(client, sid, 'deadliner')));
  const stream = client.stream('ExecStream', { session_id: sid, command: '/tmp/cancelled 1000' });
  const ended = new Promise((done) => stream.on('error', done));
  stream.on('data', () => {});
  await until('the command', () => running(client, sid, 'cancelled'));
  stream.cancel();
  assert.equal((await ended).code, status.CANCELLED);
  await until('the end of the command', async () => !(await running(client, sid, 'cancelled')));
}

// A stream to its end: what came, and the trailers.
function whole(stream) {
  return new Promise((done, failed) => {
    const answers = [];
    stream.on('data', (answer) => answers.push(answer));
    stream.on('error', failed);
    stream.on('status', ({ metadata }) => done({ answers, metadata }));
  });
}

async function streams(client, sid) {
  const exec = (command, more) => whole(client.stream('ExecStream', { session_id: sid, command }, more));
  const text = ({ answers }) => answers.map((answer) => answer.chunk).join('');
  const plain = await exec("printf 'a\\303'; sleep 0.3; printf '\\251\\n\\n'; exit 3");
  assert.equal(text(plain), 'aé\n\n');
  assert.deepEqual(plain.metadata.get('x-k8e-exit-code'), ['3']);
  const frames = text(await exec('echo hello; exit 9', { 'x-k8e-stream': 'sse' }));
  assert.match(frames, /^data: \{"pid":\d+\}\n\ndata: hello\n\n/);
  assert.ok(frames.endsWith('\n\ndata: {"exit":9}\n\n'), frames);
}

async function background(client, sid) {
  const start = (command) => client.call('Exec', { session_id: sid, command, background: true });
  const poll = (run) => client.call('PollRun', { run_id: run.run_id });
  const runs = [];
  for (let n = 0; n < 5; n++) runs.push(await start('until test -e go; do sleep 0.05; done; exit 4'));
  assert.ok(runs.every((run) => run.status === 'started'));
  const limit = 'background run limit reached (5 active runs)';
  await refused(status.RESOURCE_EXHAUSTED, limit, start('true'));
  assert.equal((await poll(runs[0])).status, 'running');
  await client.call('WriteFile', { session_id: sid, path: 'go', content: '' });
  for (const run of runs) {
    await until('the end of a run', async () => (await poll(run)).status === 'completed');
    assert.equal((await poll(run)).exit_code, 4);
  }
  const sixth = await start('echo sixth');
  await until('the sixth', async () => (await poll(sixth)).status === 'completed');
  assert.equal((await poll(sixth)).stdout, 'sixth\n');
}

async function files(client, sid) {
  const write = (path, content, mode) => client.call('WriteFile', { session_id: sid, path, content, mode });
  const readFile = (path) => client.call('ReadFile', { session_id: sid, path });
  const content = 'héllo\n'.repeat(200_000);
  assert.equal((await write('deep/text.txt', content)).ok, true);
  await write('deep/text.txt', 'more', 'a');
  assert.equal((await readFile('/workspace/deep/text.txt')).content, `${content}more`);
  await refused(status.NOT_FOUND, 'missing', readFile('missing'));
  await client.call('Exec', { session_id: sid, command: "printf '\\377' > binary" });
  await refused(status.FAILED_PRECONDITION, 'k8e.v1 ReadFile', readFile('binary'));
  const listed = await client.call('ListFiles', { session_id: sid });
  const one = listed.files.find((file) => file.path === '/workspace/deep/text.txt');
  assert.deepEqual([one.type, one.size], ['file', Buffer.byteLength(content) + 4]);
}

async function pip(client, sid) {
  const install = (packages) => client.call('PipInstall', { session_id: sid, packages });
  await refused(status.INVALID_ARGUMENT, 'invalid package name', install(['--pre']));
  // The sandbox reaches nobody.
  await client.call('UpdateAllowedHosts', { session_id: sid, hosts: [] });
  const packages = ['no-such-package>=2'];
  const done = await client.call('PipInstall', { session_id: sid, packages }, 150_000);
  assert.ok(done.exit_code !== 0 && done.output.includes('no-such-package'), done.output);
}

async function history(client, sid) {
  const page = await client.call('GetTranscript', { session_id: sid });
  assert.ok(page.output.startsWith('hi\noops\n') || page.output.startsWith('oops\nhi\n'));
  assert.ok(page.next_offset > 0 && page.next_offset <= 256 * 1024);
  const { events, returned } = await client.call('GetEvents', { session_id: sid, limit: 3 });
  assert.deepEqual([events.length, returned], [3, 3]);
  assert.equal(JSON.parse(events[0]).session_id, sid);
}

async function terminals(client, sid) {
  const argv = ['sh', '-c', 'stty -echo; echo ready; exec sh'];
  const size = { rows: 30, cols: 90 };
  const { terminal_id } = await client.call('CreateTerminal', { session_id: sid, argv, ...size });
  const screen = { said: '', exit: null };
  const attach = () => {
    const stream = client.stream('TerminalStream', { terminal_id });
    stream.on('data', ({ frame, data, exit }) => {
      if (frame === 'exit') screen.exit = exit;
      else screen.said += data.toString();
    });
    stream.on('error', (error) => assert.equal(error.code, status.CANCELLED));
    return stream;
  };
  const type = (text) => client.call('TerminalWrite', { terminal_id, data: Buffer.from(text) });
  const says = (text) => until(text, () => screen.said.includes(text));
  const first = attach();
  await says('ready');
  await client.call('TerminalResize', { terminal_id, rows: 40, cols: 100 });
  await type('stty size\n');
  await says('40 100');
  first.cancel();
  screen.said = '';
  attach();
  await says('40 100');
  const { process_group_id } = await client.call('TerminalForeground', { terminal_id });
  assert.ok(process_group_id > 0);
  await type("trap 'echo got-it' INT; echo trap$((1+1)); read x\n");
  await says('trap2');
  await client.call('TerminalSignal', { terminal_id, signal: 'TERMINAL_SIGNAL_INT' });
  await says('got-it');
  await type('\nexit 5\n');
  await until('the exit', () => screen.exit);
  assert.deepEqual([screen.exit.exit_code, screen.exit.signal], [5, '']);
  const other = await client.call('CreateTerminal', { session_id: sid, argv: ['cat'] });
  const destroyed = await client.call('TerminalDestroy', { terminal_id: other.terminal_id, grace_ms: 100 });
  assert.equal(destroyed.ok, true);
}

// Nothing in it runs, nothing of it is lost.
async function pausing(client, sid) {
  assert.equal((await client.call('PauseSession', { session_id: sid })).ok, true);
  assert.equal((await client.call('GetSession', { session_id: sid })).phase, 'Paused');
  await refused(status.FAILED_PRECONDITION, 'paused', client.call('Exec', { session_id: sid, command: 'true' }));
  assert.equal((await client.call('ResumeSession', { session_id: sid })).ok, true);
  const ran = await client.call('Exec', { session_id: sid, command: 'echo back' });
  assert.equal(ran.stdout, 'back\n');
}

// A child that runs commands, where its parent's files are.
async function subAgents(client, sid) {
  await client.call('WriteFile', { session_id: sid, path: 'shared.txt', content: 'of the parent' });
  const child = (await client.call('RunSubAgent', { parent_session_id: sid })).session_id;
  const ran = await client.call('Exec', { session_id: child, command: 'cat shared.txt; exit 9' });
  assert.deepEqual([ran.stdout, ran.exit_code], ['of the parent', 9]);
  await refused(status.PERMISSION_DENIED, 'max depth 1', client.call('RunSubAgent', { parent_session_id: child }));
  assert.equal((await client.call('DestroySession', { session_id: child })).ok, true);
}

// Who asks waits, and somebody else answers.
async function approvals(client, sid) {
  // Another key of the same principal. With neither key nor certificate nobody is let in.
  const person = new Client(null, null, process.env.SECOND_APIKEY);
  await refused(status.UNAUTHENTICATED, 'k8e apikey create', new Client().call('ListSessions'));
  const { approval_id } = await client.call('ConfirmAction', { session_id: sid, action: 'drop the database' });
  const decision = { approval_id, approved: true, reason: 'because' };
  await refused(status.PERMISSION_DENIED, 'who asked', client.call('ApproveAction', decision));
  const waiting = client.call('ConfirmAction', { session_id: sid, approval_id });
  assert.equal((await person.call('ApproveAction', decision)).ok, true);
  assert.equal((await waiting).approved, true);
}

// Names and what they stand for.
async function snapshots(client) {
  const layers = ['a'.repeat(64), 'b'.repeat(64)];
  assert.equal((await client.call('SnapshotPut', { name: 'base', layers })).layers, 2);
  assert.deepEqual((await client.call('SnapshotGet', { name: 'base' })).layers, layers);
  assert.deepEqual((await client.call('SnapshotList')).names, ['base']);
}

// A URL that opens a service on the sandbox's own loopback, for who has all of it.
async function exposed(client, sid) {
  const command = 'exec python3 -m http.server 8123 --bind 127.0.0.1';
  await client.call('Exec', { session_id: sid, command, background: true });
  const { url } = await client.call('ExposeService', { session_id: sid, port: 8123 });
  // The first answer is a cookie and where to go with it, and fetch keeps no cookies.
  const token = new URL(url).searchParams.get('k8e_token');
  const bare = url.split('?')[0];
  const get = (headers) => fetch(bare, { headers }).then((answer) => answer.status);
  const deadline = Date.now() + SOON;
  while ((await get({ authorization: `Bearer ${token}` })) !== 200) {
    assert.ok(Date.now() < deadline, 'the service did not come');
    await pause(50);
  }
  assert.equal(await get({}), 404);
  assert.equal((await client.call('ListExposed', { session_id: sid })).services.length, 1);
  assert.equal((await client.call('UnexposeService', { session_id: sid, port: 8123 })).ok, true);
  assert.equal(await get({ authorization: `Bearer ${token}` }), 404);
}

async function main() {
  const client = await logIn();
  const sid = await sessions(client);
  const parts = [commands, brokenOff, streams, background, files, pip, history, terminals];
  for (const part of [...parts, pausing, subAgents, approvals, snapshots, exposed]) {
    const begun = Date.now();
    await part(client, sid);
    console.log(`${part.name}: ${(Date.now() - begun) / 1000} s`);
  }
  assert.equal((await client.call('DestroySession', { session_id: sid })).ok, true);
  await refused(status.NOT_FOUND, `session ${sid} not found`, client.call('Exec', { session_id: sid }));
  assert.deepEqual(RPCS.filter((rpc) => !called.has(rpc)), []);
  console.log('every call was made');
}

main().then(
  () => process.exit(0),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
