// A modern server (protocol 2026-07-28) on the TypeScript SDK 2.4.0.
//
//     node modern_ts.mjs [--port P | --stdio] [--legacy] [--ledger FILE]
//
// Prints `READY http://127.0.0.1:PORT/mcp` once it accepts. It refuses old clients unless --legacy serves them too.
// The ledger has one JSON object a line: which tools ran. Packages come from MRTR_NODE_MODULES.
import { appendFileSync } from 'node:fs';
import { createServer } from 'node:http';
import { createRequire } from 'node:module';
import { Readable } from 'node:stream';
import { pipeline } from 'node:stream/promises';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

const modules = process.env.MRTR_NODE_MODULES ?? fileURLToPath(new URL('../../../.parts/node/node_modules', import.meta.url));
const require = createRequire(`${modules}/`);
const { McpServer, createMcpHandler, fromJsonSchema, inputRequired } = require('@modelcontextprotocol/server');

const { serveStdio } = require('@modelcontextprotocol/server/stdio');

const { values: flags } = parseArgs({
    options: { port: { type: 'string', default: '0' }, stdio: { type: 'boolean' }, legacy: { type: 'boolean' }, ledger: { type: 'string' } }
});

function record(event, tool) {
    if (flags.ledger) appendFileSync(flags.ledger, `${JSON.stringify({ t: Date.now() / 1000, event, tool })}\n`);
}

const text = value => ({ content: [{ type: 'text', text: value }] });
const takes = properties => fromJsonSchema({ type: 'object', properties, required: Object.keys(properties) });

function form(message) {
    const properties = { name: { type: 'string', title: 'Name' } };
    return inputRequired.elicit({ message, requestedSchema: { type: 'object', properties, required: ['name'] } });
}

function prompt(words) {
    return inputRequired.createMessage({ messages: [{ role: 'user', content: { type: 'text', text: words } }], maxTokens: 100 });
}

function build() {
    const server = new McpServer({ name: 'modern-ts', version: '2.4.0' });
    server.registerTool('echo', { inputSchema: takes({ text: { type: 'string' } }) }, async given => {
        record('run', 'echo');
        return text(given.text);
    });
    server.registerTool('ask', { inputSchema: takes({ question: { type: 'string' } }) }, async (given, context) => {
        record('run', 'ask');
        const answer = context.mcpReq.inputResponses?.name;
        if (answer !== undefined) return text(answer.action === 'accept' ? `accept:${JSON.stringify(answer.content)}` : answer.action);
        return inputRequired({ inputRequests: { name: form(given.question) }, requestState: 'asked once' });
    });
    server.registerTool('ask_many', { inputSchema: takes({}) }, async (_given, context) => {
        record('run', 'ask_many');
        const { elicit, sample, roots } = context.mcpReq.inputResponses ?? {};
        if (elicit && sample && roots) {
            const answer = `${elicit.action}:${JSON.stringify(elicit.content)}`;
            return text(JSON.stringify({ elicit: answer, sample: sample.content.text, roots: roots.roots.map(root => root.uri) }));
        }
        const inputRequests = { elicit: form('question of many'), sample: prompt('prompt of many'), roots: inputRequired.listRoots() };
        return inputRequired({ inputRequests, requestState: 'asked many' });
    });
    server.registerTool('sample', { inputSchema: takes({ prompt: { type: 'string' } }) }, async (given, context) => {
        record('run', 'sample');
        const answer = context.mcpReq.inputResponses?.sample;
        if (answer !== undefined) return text(answer.content.text);
        return inputRequired({ inputRequests: { sample: prompt(given.prompt) }, requestState: 'sampled once' });
    });
    const inputSchema = fromJsonSchema({
        type: 'object',
        properties: { steps: { type: 'integer' }, delay_seconds: { type: 'number' } },
        required: ['steps']
    });
    server.registerTool('progress', { inputSchema }, async (given, context) => {
        record('run', 'progress');
        const progressToken = context.mcpReq._meta?.progressToken;
        for (let step = 1; step <= given.steps && progressToken !== undefined; step++) {
            const params = { progressToken, progress: step, total: given.steps, message: `step ${step}` };
            await context.mcpReq.notify({ method: 'notifications/progress', params });
            await sleep(1000 * (given.delay_seconds ?? 0));
        }
        return text('done');
    });
    server.registerTool('fail', { inputSchema: takes({ message: { type: 'string' } }) }, async given => {
        record('run', 'fail');
        return { ...text(given.message), isError: true };
    });
    server.registerTool('hang', { inputSchema: takes({}) }, async (_given, context) => {
        record('run', 'hang');
        await new Promise(resolve => context.mcpReq.signal.addEventListener('abort', resolve, { once: true }));
        record('cancelled', 'hang');
        return text('cancelled');
    });
    return server;
}

if (flags.stdio) serveStdio(build, { legacy: flags.legacy ? 'serve' : 'reject' });
else listen();

function listen() {
    const handler = createMcpHandler(build, { legacy: flags.legacy ? 'stateless' : 'reject' });
    const listener = createServer(async (incoming, outgoing) => {
        const gone = new AbortController();
        outgoing.on('close', () => gone.abort());
        const body = ['GET', 'HEAD'].includes(incoming.method) ? undefined : Readable.toWeb(incoming);
        const url = new URL(incoming.url, `http://${incoming.headers.host}`);
        const request = new Request(url, { method: incoming.method, headers: incoming.headers, body, duplex: 'half', signal: gone.signal });
        const response = await handler.fetch(request);
        outgoing.writeHead(response.status, Object.fromEntries(response.headers));
        outgoing.flushHeaders();
        if (response.body === null) return outgoing.end();
        // A client that leaves ends the stream in the middle, which is no error here.
        await pipeline(Readable.fromWeb(response.body), outgoing).catch(() => undefined);
    });
    listener.listen(Number(flags.port), '127.0.0.1', () => console.log(`READY http://127.0.0.1:${listener.address().port}/mcp`));
}
