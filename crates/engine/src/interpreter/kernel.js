// JavaScript kernel of k8e's code interpreter: runs cells in one context, as the console of a debugger does, so that
// declarations may be repeated and `await` may be used anywhere.
//
// Messages are JSON objects, one per line: they come on descriptor 3 and leave on descriptor 4, which child processes
// do not inherit. A worker thread reads them, so that an interrupt is seen also while a cell runs. What child processes
// write to standard output or error is standard error of the cell.
'use strict';

const { Worker } = require('node:worker_threads');
const inspector = require('node:inspector');
const fs = require('node:fs');
const nodeModule = require('node:module');
const path = require('node:path');
const util = require('node:util');

const REQUESTS = 3;
const REPLIES = 4;
const MARKS = 2;
const TRACEBACK_CHARS_MAX = 200_000;

let messageBytesMax = 1 << 20;
// Rejects the execution that runs; none between executions.
let interruptCell = null;

function writeAll(fd, text) {
  let data = Buffer.from(text);
  while (data.length > 0) {
    try {
      data = data.subarray(fs.writeSync(fd, data));
    } catch (error) {
      // The server reads slowly.
      if (error.code !== 'EAGAIN') throw error;
      Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 5);
    }
  }
}

function send(message) {
  // JSON cannot carry lone surrogates.
  const text = JSON.stringify(message, (_, value) => (typeof value === 'string' ? wellFormed(value) : value));
  writeAll(REPLIES, text + '\n');
}

function wellFormed(text) {
  return text.replace(/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g, '\ufffd');
}

function end(id) {
  writeAll(REPLIES, '\n');
  send({ type: 'end', id });
  writeAll(MARKS, `\0k8e ${id}\n`);
}

// Output of the cell itself.
for (const [stream, type] of [[process.stdout, 'stdout'], [process.stderr, 'stderr']]) {
  stream.write = (chunk, encoding, callback) => {
    const text = typeof chunk === 'string' ? chunk : Buffer.from(chunk).toString('utf8');
    for (let at = 0; at < text.length; at += 65536) send({ type, text: text.slice(at, at + 65536) });
    const done = typeof encoding === 'function' ? encoding : callback;
    if (typeof done === 'function') process.nextTick(done);
    return true;
  };
}

function jsonText(value) {
  try {
    return JSON.stringify(value);
  } catch {
    return undefined;
  }
}

const isPlain = (value) => Array.isArray(value) || Object.getPrototypeOf(value) === Object.prototype;

// A value as texts by MIME type. Objects may give them themselves: as `Symbol.for("Jupyter.display")` or `_toMime()`.
function bundle(value) {
  const found = {};
  if (value !== null && typeof value === 'object') {
    for (const method of [value[Symbol.for('Jupyter.display')], value._toMime]) {
      if (typeof method !== 'function') continue;
      try {
        for (const [mime, made] of Object.entries(method.call(value) ?? {})) {
          const isJson = mime === 'application/json' || mime.endsWith('+json');
          const text = isJson ? jsonText(made) : made instanceof Uint8Array ? Buffer.from(made).toString('base64') : String(made);
          if (text !== undefined) found[mime] = text;
        }
      } catch {
        // It is shown as text then.
      }
    }
    try {
      if (found['application/json'] === undefined && isPlain(value)) found['application/json'] = jsonText(value);
    } catch {
      // A proxy that throws.
    }
  }
  if (found['text/plain'] === undefined) {
    try {
      found['text/plain'] = typeof value === 'string' ? value : util.inspect(value);
    } catch (error) {
      found['text/plain'] = `<a value that cannot be shown: ${error}>`;
    }
  }
  return found;
}

// Sends a result; what is too large for a message is left out, the largest first.
function publish(data, main) {
  const room = messageBytesMax - 4096;
  const size = Object.entries(data).map(([mime, text]) => [Buffer.byteLength(JSON.stringify(text ?? '')), mime]);
  size.sort((a, b) => b[0] - a[0]);
  let total = size.reduce((all, [bytes]) => all + bytes, 0);
  for (const [bytes, mime] of size) {
    if (total <= room) break;
    total -= bytes;
    delete data[mime];
    send({ type: 'stderr', text: `a result of ${bytes} bytes (${mime}) was left out: at most ${room} are sent; write it to a file\n` });
  }
  send({ type: 'result', main, data });
}

// The stack without the frames of this file and of Node.js.
function stackOf(error) {
  const lines = String(error.stack).split('\n');
  return lines.filter((line) => !/\bnode:|\[eval\]|^ +at new Promise/.test(line)).join('\n');
}

function describe(error) {
  try {
    return error instanceof Error ? stackOf(error) : util.inspect(error);
  } catch {
    return 'an error that cannot be shown';
  }
}

function report(error) {
  // An interrupt may have cut a message.
  writeAll(REPLIES, '\n');
  const isError = util.types.isNativeError(error) || error instanceof Error;
  let name = 'Error';
  let value = '';
  let traceback = '';
  try {
    name = isError ? String(error.name) : 'Uncaught';
    value = isError ? String(error.message) : util.inspect(error);
    traceback = isError ? stackOf(error) : `Uncaught ${value}`;
  } catch {
    traceback = name;
  }
  send({
    type: 'error',
    name: name.slice(0, 1000),
    value: value.slice(0, TRACEBACK_CHARS_MAX),
    traceback: traceback.slice(0, TRACEBACK_CHARS_MAX),
  });
}

// Splits code into code, and texts and comments, which are left alone.
const TOKENS = /\/\/[^\n]*|\/\*[\s\S]*?\*\/|'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*"|`(?:\\.|[^`\\])*`/g;
const STATIC_IMPORT = /^([ \t]*)import\s+(?:([\w$]+)\s*,?\s*)?(?:\*\s*as\s+([\w$]+)\s+|\{([^}]*)\}\s*)?from\s*(['"][^'"\n]+['"])[ \t]*;?/gm;
const BARE_IMPORT = /^([ \t]*)import\s*(['"][^'"\n]+['"])[ \t]*;?/gm;

// Imports of modules, which code of a console cannot have: as calls.
function withoutImports(code) {
  if (!/\bimport\b/.test(code)) return code;
  const called = code
    .replace(STATIC_IMPORT, (_, indent, standard, all, names, from) => {
      const module = `await __k8e_import(${from})`;
      if (all) return `${indent}const ${all} = ${module};` + (standard ? ` const ${standard} = ${all}.default;` : '');
      const parts = (names ?? '').split(',').map((name) => name.trim().replace(/\s+as\s+/, ': ')).filter(Boolean);
      if (standard) parts.unshift(`default: ${standard}`);
      return `${indent}const { ${parts.join(', ')} } = ${module};`;
    })
    .replace(BARE_IMPORT, (_, indent, from) => `${indent}await __k8e_import(${from});`);
  let at = 0;
  let out = '';
  const plain = (text) => text.replace(/(?<![\w$.])import\s*\(/g, '__k8e_import(');
  for (const token of called.matchAll(TOKENS)) {
    out += plain(called.slice(at, token.index)) + token[0];
    at = token.index + token[0].length;
  }
  return out + plain(called.slice(at));
}

function withoutTypes(code) {
  if (typeof nodeModule.stripTypeScriptTypes !== 'function') {
    const error = new Error(`TypeScript needs Node.js 22.13 or newer, and this is ${process.version}: install it, or use javascript`);
    error.stack = error.message;
    throw error;
  }
  return nodeModule.stripTypeScriptTypes(code, { mode: 'strip' });
}

const here = () => nodeModule.createRequire(path.join(process.cwd(), 'cell.js'));
const hidden = (name, value) => Object.defineProperty(globalThis, name, { value, configurable: true, writable: true });
hidden('require', Object.assign((name) => here()(name), { resolve: (...args) => here().resolve(...args) }));
hidden('display', (...values) => values.forEach((value) => publish(bundle(value), false)));
hidden('__k8e_import', (name) => {
  let file = String(name);
  // From the working directory, and not from where this file is.
  if (!/^[a-z]+:/.test(file)) {
    try {
      file = here().resolve(file);
    } catch {
      // import() says what is wrong with it.
    }
    if (path.isAbsolute(file)) file = require('node:url').pathToFileURL(file).href;
  }
  return import(file);
});
delete globalThis.module;
delete globalThis.exports;

const session = new inspector.Session();
session.connect();
const post = (method, params) =>
  new Promise((resolve, reject) => {
    session.post(method, params, (error, result) => (error ? reject(error) : resolve(result)));
  });

// The value behind an object of the debugger.
async function valueOf(remote) {
  if (remote.objectId === undefined) {
    if (remote.unserializableValue === undefined) return remote.value;
    const { unserializableValue: text } = remote;
    return text.endsWith('n') ? BigInt(text.slice(0, -1)) : Number(text);
  }
  let taken;
  hidden('__k8e_take', (value) => {
    taken = value;
  });
  try {
    const functionDeclaration = "function() { 'use strict'; globalThis.__k8e_take(this) }";
    await post('Runtime.callFunctionOn', { objectId: remote.objectId, functionDeclaration });
    return taken;
  } finally {
    delete globalThis.__k8e_take;
    await post('Runtime.releaseObject', { objectId: remote.objectId });
  }
}

class KeyboardInterrupt extends Error {
  constructor() {
    super('the execution was interrupted');
    this.name = 'KeyboardInterrupt';
    this.stack = `${this.name}: ${this.message}`;
  }
}

async function runCell(code) {
  let expression = withoutImports(process.argv[1] === 'ts' ? withoutTypes(code) : code);
  // An object, and not a block.
  if (/^\s*\{[\s\S]*\}\s*$/.test(expression)) {
    try {
      new (require('node:vm').Script)(`(${expression}\n)`);
      expression = `(${expression}\n)`;
    } catch {
      // A block after all.
    }
  }
  const { result, exceptionDetails } = await post('Runtime.evaluate', { expression, replMode: true, awaitPromise: true });
  if (exceptionDetails) throw exceptionDetails.exception ? await valueOf(exceptionDetails.exception) : new Error(exceptionDetails.text);
  const value = await valueOf(result);
  if (value !== undefined) publish(bundle(value), true);
}

async function execute({ id, code, env, message_bytes_max }) {
  messageBytesMax = message_bytes_max;
  const before = Object.keys(env).map((name) => [name, process.env[name]]);
  Object.assign(process.env, env);
  const interrupted = new Promise((_, reject) => {
    interruptCell = () => reject(new KeyboardInterrupt());
  });
  const cell = runCell(code);
  cell.catch(() => {});
  try {
    await Promise.race([cell, interrupted]);
  } catch (error) {
    // Execution was terminated by an interrupt.
    report(error?.code === 'ERR_INSPECTOR_COMMAND' ? new KeyboardInterrupt() : error);
  }
  interruptCell = null;
  for (const [name, value] of before) {
    if (value === undefined) delete process.env[name];
    else process.env[name] = value;
  }
  end(id);
}

// Reads requests, and ends what runs on the main thread when an interrupt comes.
function worker() {
  const { parentPort } = require('node:worker_threads');
  const inspector = require('node:inspector');
  const fs = require('node:fs');
  const session = new inspector.Session();
  session.connectToMainThread();
  const chunk = Buffer.alloc(65536);
  let parts = [];
  const read = () => {
    fs.read(3, chunk, 0, chunk.length, null, (error, bytes) => {
      if (error || bytes === 0) process.kill(process.pid, 'SIGKILL');
      let data = Buffer.from(chunk.subarray(0, bytes));
      for (let at = data.indexOf(10); at >= 0; at = data.indexOf(10)) {
        const request = JSON.parse(Buffer.concat([...parts, data.subarray(0, at)]).toString('utf8'));
        parts = [];
        data = data.subarray(at + 1);
        if (request.interrupt !== undefined) session.post('Runtime.terminateExecution');
        parentPort.postMessage(request);
      }
      parts.push(data);
      read();
    });
  };
  read();
}

// The group gets this signal, for child processes; the kernel itself is interrupted by message.
process.on('SIGINT', () => {});
process.on('uncaughtException', (error) => send({ type: 'stderr', text: `Uncaught ${describe(error)}\n` }));
process.on('unhandledRejection', (error) => send({ type: 'stderr', text: `Uncaught (in promise) ${describe(error)}\n` }));

const reader = new Worker(`(${worker})()`, { eval: true, argv: [], execArgv: [] });
let turn = Promise.resolve();
reader.on('message', (request) => {
  if (request.interrupt !== undefined) interruptCell?.();
  else turn = turn.then(() => execute(request));
});
reader.on('online', () => end('ready'));
