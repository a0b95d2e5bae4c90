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
        const requestedSchema = { type: 'object', properties: { name: { type: 'string', title: 'Name' } }, required: ['name'] };
        const question = inputRequired.elicit({ message: given.question, requestedSchema });
        return inputRequired({ inputRequests: { name: question }, requestState: 'asked once' });
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
