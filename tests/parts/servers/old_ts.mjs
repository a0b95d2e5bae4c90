// An old server (protocol 2025-11-25, Streamable HTTP with sessions) on the TypeScript SDK 1.32.
//
//     node old_ts.mjs [--port P | --stdio] [--event-store | --stateless | --sse] [--json] [--ledger FILE]
//
// Prints `READY http://127.0.0.1:PORT/mcp` (`/sse` with --sse) once it accepts. The ledger has one JSON object a line: what the tools really did.
// Packages come from MRTR_NODE_MODULES, since Node resolves them from the script's place and they are not installed there.
import { randomUUID } from 'node:crypto';
import { appendFileSync, existsSync } from 'node:fs';
import { createServer } from 'node:http';
import { createRequire } from 'node:module';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

const modules = process.env.MRTR_NODE_MODULES ?? fileURLToPath(new URL('../../../.parts/node/node_modules', import.meta.url));
const require = createRequire(`${modules}/`);
const { McpServer, ResourceTemplate } = require('@modelcontextprotocol/sdk/server/mcp.js');
const { SSEServerTransport } = require('@modelcontextprotocol/sdk/server/sse.js');
const { StreamableHTTPServerTransport } = require('@modelcontextprotocol/sdk/server/streamableHttp.js');
const { StdioServerTransport } = require('@modelcontextprotocol/sdk/server/stdio.js');
const { completable } = require('@modelcontextprotocol/sdk/server/completable.js');
const types = require('@modelcontextprotocol/sdk/types.js');
const { z } = require('zod');

const { values: flags } = parseArgs({
    options: {
        port: { type: 'string', default: '0' },
        'event-store': { type: 'boolean' },
        stateless: { type: 'boolean' },
        json: { type: 'boolean' },
        sse: { type: 'boolean' },
        stdio: { type: 'boolean' },
        ledger: { type: 'string' }
    }
});

function record(event, tool, more = {}) {
    if (flags.ledger) appendFileSync(flags.ledger, `${JSON.stringify({ t: Date.now() / 1000, event, tool, ...more })}\n`);
}

// The SDK's own InMemoryEventStore sorts by Date.now() and loses events of the same millisecond; this one keeps the order.
class OrderedEventStore {
    events = [];

    async storeEvent(streamId, message) {
        return String(this.events.push({ streamId, message }));
    }

    async getStreamIdForEventId(eventId) {
        return this.events[Number(eventId) - 1]?.streamId;
    }

    async replayEventsAfter(lastEventId, { send }) {
        const streamId = await this.getStreamIdForEventId(lastEventId);
        const start = Number(lastEventId);
        for (const [index, event] of this.events.slice(start).entries()) {
            // A priming event is stored as an empty object: replaying it would put a non-message on the wire.
            if (event.streamId === streamId && event.message.jsonrpc) await send(String(start + index + 1), event.message);
        }
        return streamId;
    }
}

const text = value => ({ content: [{ type: 'text', text: typeof value === 'string' ? value : JSON.stringify(value) }] });
const answered = result => (result.action === 'accept' && result.content ? `accept:${JSON.stringify(result.content)}` : result.action);

function form(message, title = 'Name') {
    const properties = { name: { type: 'string', title: 'Name' } };
    return { mode: 'form', message, requestedSchema: { type: 'object', title, properties, required: ['name'] } };
}

function prompt(words) {
    return { messages: [{ role: 'user', content: { type: 'text', text: words } }], maxTokens: 100 };
}

// Nested requests on the POST stream of the call. Like most old servers, they ask whatever the client declared.
function elicit(extra, params, options) {
    return extra.sendRequest({ method: 'elicitation/create', params }, types.ElicitResultSchema, options);
}

function sample(extra, params, schema = types.CreateMessageResultSchema) {
    return extra.sendRequest({ method: 'sampling/createMessage', params }, schema);
}

// Wait until a file is there: a test holds the tool at this point.
async function released(path, extra) {
    while (path && !existsSync(path)) await sleep(10, undefined, { signal: extra.signal });
}

async function progress(extra, done, total) {
    const progressToken = extra._meta?.progressToken;
    if (progressToken === undefined) return;
    const params = { progressToken, progress: done, total, message: `step ${done}` };
    await extra.sendNotification({ method: 'notifications/progress', params });
}

function buildServer() {
    const server = new McpServer(
        { name: 'old-ts', version: '1.32.2' },
        { capabilities: { logging: {} }, instructions: 'An old server for the tests.' }
    );
    let count = 0;
    let urlAsked = false;

    // The ledger has a line when something starts, when its caller cancels it, and when it ends of itself.
    async function recorded(name, args, extra, run) {
        const session = extra.sessionId ?? null;
        record('run', name, { session, arguments: args });
        extra.signal.addEventListener('abort', () => record('cancelled', name, { session }), { once: true });
        try {
            const result = await run(args, extra);
            if (!extra.signal.aborted) record('finished', name, { session });
            return result;
        } catch (error) {
            if (!extra.signal.aborted) record('failed', name, { session, message: error.message });
            throw error;
        }
    }

    function tool(name, config, run) {
        const described = { description: `The ${name} tool.`, inputSchema: {}, ...config };
        server.registerTool(name, described, (args, extra) => recorded(name, args, extra, run));
    }

    async function nested(name, question) {
        try {
            const result = await question;
            record('answered', name, { result });
            return result;
        } catch (error) {
            record('refused', name, { code: error.code, message: error.message });
            throw error;
        }
    }

    tool('echo', { inputSchema: { text: z.string() }, annotations: { readOnlyHint: true } }, args => text(args.text));
    tool('big', { inputSchema: { bytes: z.number().int() } }, args => text('x'.repeat(args.bytes)));
    tool('fail', { inputSchema: { message: z.string() } }, args => ({ ...text(args.message), isError: true }));
    tool(
        'structured',
        { inputSchema: { n: z.number().int() }, outputSchema: { n: z.number().int(), square: z.number().int() } },
        ({ n }) => ({ ...text({ n, square: n * n }), structuredContent: { n, square: n * n } })
    );


    const question = z.string().default('Your name?');
    tool('ask', { inputSchema: { question, title: z.string().optional() } }, async ({ question, title }, extra) =>
        text(answered(await nested('ask', elicit(extra, form(question, title)))))
    );
    tool('ask_get', { inputSchema: { question } }, async ({ question }) =>
        text(answered(await nested('ask_get', server.server.elicitInput(form(question)))))
    );
    tool('ask_url', { inputSchema: { url: z.string() } }, async ({ url }, extra) => {
        const params = { mode: 'url', message: 'Please open the page', elicitationId: randomUUID(), url };
        return text(answered(await nested('ask_url', elicit(extra, params))));
    });
    // Files hold it before its question and after the answer, until they are there.
    const between = { question, before: z.string().default(''), after: z.string().default('') };
    for (const [name, annotations] of [['ask_slow', {}], ['ask_read', { readOnlyHint: true }]]) {
        tool(name, { inputSchema: between, annotations }, async ({ question, before, after }, extra) => {
            await released(before, extra);
            const told = answered(await nested(name, elicit(extra, form(question))));
            await released(after, extra);
            return text(told);
        });
    }
    tool('ask_sequence', { inputSchema: { n: z.number().int() } }, async ({ n }, extra) => {
        const answers = [];
        for (let i = 1; i <= n; i++) {
            answers.push(answered(await nested('ask_sequence', elicit(extra, form(`question ${i}`)))));
        }
        return text(answers.join(', '));
    });
    tool('ask_many', {}, async (_args, extra) => {
        const [answer, message, { roots }] = await Promise.all([
            nested('ask_many', elicit(extra, form('question of many'))),
            nested('ask_many', sample(extra, prompt('prompt of many'))),
            nested('ask_many', extra.sendRequest({ method: 'roots/list' }, types.ListRootsResultSchema))
        ]);
        return text({ elicit: answered(answer), sample: message.content.text, roots: roots.map(root => root.uri) });
    });

    tool('sample', { inputSchema: { prompt: z.string() } }, async args => {
        const message = await nested('sample', server.server.createMessage(prompt(args.prompt)));
        return text(message.content.text);
    });
    tool('sample_related', { inputSchema: { prompt: z.string() } }, async (args, extra) => {
        const message = await nested('sample_related', sample(extra, prompt(args.prompt)));
        return text(message.content.text);
    });
    tool('sample_tools', { inputSchema: { prompt: z.string() } }, async (args, extra) => {
        const inputSchema = { type: 'object', properties: { city: { type: 'string' } } };
        const params = {
            ...prompt(args.prompt),
            tools: [{ name: 'weather', description: 'The weather in a city.', inputSchema }],
            toolChoice: { mode: 'auto' }
        };
        const { content } = await nested('sample_tools', sample(extra, params, types.CreateMessageResultWithToolsSchema));
        return text((Array.isArray(content) ? content : [content]).map(block => block.type));
    });
    tool('roots', {}, async () => text((await nested('roots', server.server.listRoots())).roots.map(root => root.uri)));
    tool('ping_me', {}, async () => {
        await nested('ping_me', server.server.ping());
        return text('pong');
    });
    tool('url_required', { inputSchema: { url: z.string() } }, ({ url }) => {
        if (urlAsked) return text('done');
        urlAsked = true;
        const elicitation = { mode: 'url', message: 'Please authorise', elicitationId: randomUUID(), url };
        throw new types.UrlElicitationRequiredError([elicitation]);
    });

    tool(
        'progress',
        { inputSchema: { steps: z.number().int(), delay_seconds: z.number().default(0) } },
        async ({ steps, delay_seconds }, extra) => {
            for (let i = 1; i <= steps; i++) {
                await progress(extra, i, steps);
                await sleep(delay_seconds * 1000, undefined, { signal: extra.signal });
            }
            return text('done');
        }
    );
    tool('progress_ask', { inputSchema: { steps: z.number().int() } }, async ({ steps }, extra) => {
        for (let i = 1; i <= steps; i++) await progress(extra, i, 2 * steps);
        const answer = answered(await nested('progress_ask', elicit(extra, form('halfway'))));
        for (let i = steps + 1; i <= 2 * steps; i++) await progress(extra, i, 2 * steps);
        return text(answer);
    });
    tool('logs', {}, async (_args, extra) => {
        for (const level of ['debug', 'info', 'warning', 'error']) {
            // sendLoggingMessage would go to the GET stream. The level is checked as it does, by the SDK's private method.
            if (server.server.isMessageIgnored(level, extra.sessionId)) continue;
            const params = { level, logger: 'old-ts', data: `a ${level} message` };
            await extra.sendNotification({ method: 'notifications/message', params });
        }
        return text('done');
    });

    tool('give_up', { inputSchema: { seconds: z.number() } }, async ({ seconds }, extra) => {
        try {
            return text(answered(await nested('give_up', elicit(extra, form('hurry'), { timeout: seconds * 1000 }))));
        } catch (error) {
            if (error.code === types.ErrorCode.RequestTimeout) return text('gave up');
            throw error;
        }
    });
    tool('hang', {}, async (_args, extra) => {
        await new Promise(resolve => extra.signal.addEventListener('abort', resolve, { once: true }));
        return text('cancelled');
    });
    tool('sleep', { inputSchema: { seconds: z.number() } }, async ({ seconds }, extra) => {
        await sleep(seconds * 1000, undefined, { signal: extra.signal });
        return text(`slept ${seconds}`);
    });
    tool('late', { inputSchema: { delay_seconds: z.number() } }, ({ delay_seconds }) => {
        setTimeout(() => {
            nested('late', server.server.elicitInput(form('a late question'))).catch(() => {}); // it is in the ledger
        }, delay_seconds * 1000);
        return text('done');
    });
    tool('whoami', { annotations: { readOnlyHint: true } }, (_args, extra) =>
        text({
            headers: extra.requestInfo?.headers,
            capabilities: server.server.getClientCapabilities(),
            clientInfo: server.server.getClientVersion(),
            session: extra.sessionId
        })
    );
    tool('counter', {}, () => text(String(++count)));

    const message = words => ({ messages: [{ role: 'user', content: { type: 'text', text: words } }] });
    const names = completable(z.string(), value => ['Ann', 'Anna', 'Bob'].filter(name => name.startsWith(value)));
    server.registerPrompt('greet', { description: 'A greeting.', argsSchema: { name: names } }, ({ name }) =>
        message(`Hello, ${name}!`)
    );
    server.registerPrompt('ask_prompt', { description: 'A prompt that asks.' }, extra =>
        recorded('ask_prompt', {}, extra, async () =>
            message(answered(await nested('ask_prompt', elicit(extra, form('for the prompt')))))
        )
    );

    const note = (uri, words) => ({ contents: [{ uri: uri.href, mimeType: 'text/plain', text: words }] });
    server.registerResource('static', 'note://static', { mimeType: 'text/plain' }, uri => note(uri, 'a static note'));
    server.registerResource('blob', 'note://blob', { mimeType: 'application/octet-stream' }, uri => ({
        contents: [{ uri: uri.href, mimeType: 'application/octet-stream', blob: Buffer.from([0, 1, 2, 255]).toString('base64') }]
    }));
    server.registerResource('form', 'ask://form', { mimeType: 'text/plain' }, (uri, extra) =>
        recorded('ask://form', {}, extra, async () =>
            note(uri, answered(await nested('ask://form', elicit(extra, form('for the resource')))))
        )
    );
    const template = new ResourceTemplate('note://{id}', { list: undefined });
    server.registerResource('note', template, { mimeType: 'text/plain' }, (uri, { id }) => note(uri, `note ${id}`));
    return server;
}

const sessions = new Map();

async function openSession() {
    const transport = new StreamableHTTPServerTransport({
        sessionIdGenerator: flags.stateless ? undefined : randomUUID,
        enableJsonResponse: flags.json,
        eventStore: flags['event-store'] ? new OrderedEventStore() : undefined,
        onsessioninitialized: id => void sessions.set(id, transport)
    });
    transport.onclose = () => sessions.delete(transport.sessionId);
    await buildServer().connect(transport);
    return transport;
}

function refuse(response, status, code, reason) {
    response.writeHead(status, { 'content-type': 'application/json' });
    response.end(JSON.stringify({ jsonrpc: '2.0', error: { code, message: reason }, id: null }));
}

async function streamable(request, response, url) {
    const id = request.headers['mcp-session-id'];
    if (url.pathname !== '/mcp') return refuse(response, 404, -32601, 'Not found');
    if (flags.stateless) return (await openSession()).handleRequest(request, response);
    if (id !== undefined && !sessions.has(id)) return refuse(response, 404, -32001, 'Session not found');
    if (id === undefined && request.method !== 'POST') return refuse(response, 400, -32000, 'Mcp-Session-Id is required');
    // Without a session only `initialize` is accepted: a fresh transport refuses the rest with 400 and is forgotten.
    const transport = id === undefined ? await openSession() : sessions.get(id);
    await transport.handleRequest(request, response);
}

// HTTP+SSE of 2024-11-05, as the SDK's example serves it.
async function httpSse(request, response, url) {
    if (request.method === 'GET' && url.pathname === '/sse') {
        const transport = new SSEServerTransport('/messages', response);
        sessions.set(transport.sessionId, transport);
        response.on('close', () => sessions.delete(transport.sessionId));
        return buildServer().connect(transport);
    }
    const transport = sessions.get(url.searchParams.get('sessionId'));
    if (request.method !== 'POST' || url.pathname !== '/messages') return refuse(response, 404, -32601, 'Not found');
    if (transport === undefined) return response.writeHead(400).end('No transport found for sessionId');
    await transport.handlePostMessage(request, response);
}

const http = createServer(async (request, response) => {
    await (flags.sse ? httpSse : streamable)(request, response, new URL(request.url, 'http://localhost'));
});

// A late answer to a question nobody waits for any more must not end the process.
process.on('unhandledRejection', error => console.error('unhandled', error));
const path = flags.sse ? '/sse' : '/mcp';
if (flags.stdio) await buildServer().connect(new StdioServerTransport());
else http.listen(Number(flags.port), '127.0.0.1', () => console.log(`READY http://127.0.0.1:${http.address().port}${path}`));
