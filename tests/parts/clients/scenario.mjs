// One scenario of the table of eras, played by the TypeScript SDK 1.x or the client 2.4 over any transport.
//
//     node scenario.mjs [--sdk 1|2] [--era auto|legacy] [--ledger FILE] [--modules FOLDER] http URL | sse URL | stdio COMMAND...
//
// It prints what scenario.py prints, also with --calls JSON or --subscribe RESOURCE (SDK 1.x). Packages come from --modules,
// or else from MRTR_NODE_MODULES.
import { existsSync, readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';

const STEP_MS = 25_000;

const words = process.argv.slice(2);
const flags = { sdk: '1', era: 'auto', ledger: '', calls: '', subscribe: '', modules: process.env.MRTR_NODE_MODULES };
while (words[0].startsWith('--')) flags[words.shift().slice(2)] = words.shift();
const [transport, ...where] = words;
const modules = flags.modules ?? fileURLToPath(new URL('../../../.parts/node/node_modules', import.meta.url));
const require = createRequire(`${modules}/`);

const ANN = { action: 'accept', content: { name: 'Ann' } };
const SAMPLED = { role: 'assistant', model: 'test-model', content: { type: 'text', text: 'sampled' }, stopReason: 'endTurn' };
const ROOTS = { roots: [{ uri: 'file:///project', name: 'project' }] };
const capabilities = { elicitation: { form: {} }, sampling: {}, roots: {} };
const info = { name: 'scenario', version: '1' };

function load() {
    if (flags.sdk === '2') {
        const { Client, StreamableHTTPClientTransport, SSEClientTransport } = require('@modelcontextprotocol/client');
        const { StdioClientTransport } = require('@modelcontextprotocol/client/stdio');
        const client = new Client(info, { capabilities, versionNegotiation: { mode: flags.era } });
        client.setRequestHandler('elicitation/create', () => ANN);
        client.setRequestHandler('sampling/createMessage', () => SAMPLED);
        client.setRequestHandler('roots/list', () => ROOTS);
        return { client, StreamableHTTPClientTransport, SSEClientTransport, StdioClientTransport };
    }
    const { Client } = require('@modelcontextprotocol/sdk/client/index.js');
    const types = require('@modelcontextprotocol/sdk/types.js');
    const client = new Client(info, { capabilities });
    client.setRequestHandler(types.ElicitRequestSchema, () => ANN);
    client.setRequestHandler(types.CreateMessageRequestSchema, () => SAMPLED);
    client.setRequestHandler(types.ListRootsRequestSchema, () => ROOTS);
    client.setNotificationHandler(types.ResourceUpdatedNotificationSchema, message => console.log(message.params.uri));
    return {
        client,
        ...require('@modelcontextprotocol/sdk/client/streamableHttp.js'),
        ...require('@modelcontextprotocol/sdk/client/sse.js'),
        ...require('@modelcontextprotocol/sdk/client/stdio.js')
    };
}

const { client, ...transports } = load();

function open() {
    if (transport === 'http') return new transports.StreamableHTTPClientTransport(new URL(where[0]));
    if (transport === 'sse') return new transports.SSEClientTransport(new URL(where[0]));
    return new transports.StdioClientTransport({ command: where[0], args: where.slice(1), env: process.env });
}

const text = result => result.content.map(block => block.text ?? '').join('');
const tool = (name, args = {}, options = undefined) =>
    flags.sdk === '2' ? client.callTool({ name, arguments: args }, options) : client.callTool({ name, arguments: args }, undefined, options);

async function happened(event) {
    for (;;) {
        const lines = existsSync(flags.ledger) ? readFileSync(flags.ledger, 'utf8').split('\n').filter(Boolean) : [];
        if (lines.map(JSON.parse).some(line => line.event === event && line.tool === 'hang')) return;
        await sleep(20);
    }
}

const STEPS = {
    list: async () => {
        const names = [];
        let cursor;
        do {
            const page = await client.listTools(cursor === undefined ? undefined : { cursor });
            names.push(...page.tools.map(each => each.name));
            cursor = page.nextCursor;
        } while (cursor !== undefined);
        return names;
    },
    progress: async () => {
        // This SDK drops the progress that arrives in one read with the response, so the server takes its time.
        const seen = [];
        const result = await tool('progress', { steps: 3, delay_seconds: 0.05 }, { onprogress: each => seen.push(each.progress) });
        return [text(result), seen.sort()];
    },
    form: async () => text(await tool('ask', { question: 'Who?' })),
    'two at once': async () => text(await tool('ask_many')),
    sampling: async () => text(await tool('sample', { prompt: 'Say it' })),
    cancel: async () => {
        const giving = new AbortController();
        const call = tool('hang', {}, { signal: giving.signal }).catch(() => undefined);
        await happened('run');
        giving.abort('enough');
        await happened('cancelled');
        await call;
        return 'cancelled';
    },
    error: async () => {
        const result = await tool('fail', { message: 'bad luck' });
        return [Boolean(result.isError), text(result)];
    },
    'unknown tool': async () => {
        try {
            const result = await tool('no_such_tool');
            return result.isError ? 'refused' : text(result);
        } catch (error) {
            return typeof error.code === 'number' ? 'refused' : `${error}`;
        }
    }
};

async function playCalls() {
    const texts = [];
    for (const [name, args] of JSON.parse(flags.calls)) texts.push(text(await tool(name, args)));
    console.log(JSON.stringify(texts));
}

async function watch() {
    await client.subscribeResource({ uri: flags.subscribe });
    console.log('subscribed');
    for await (const _ of createInterface({ input: process.stdin })) {
        await tool('touch');
        console.log('touched');
    }
}

async function playScenario() {
    const outcomes = {};
    for (const [name, step] of Object.entries(STEPS)) {
        try {
            const late = sleep(STEP_MS, undefined, { ref: false }).then(() => Promise.reject(new Error('took too long')));
            outcomes[name] = await Promise.race([step(), late]);
        } catch (error) {
            outcomes[name] = `${error.name}: ${error.message}`;
        }
        console.log(JSON.stringify(outcomes));
    }
}

await client.connect(open());
await (flags.calls ? playCalls : flags.subscribe ? watch : playScenario)();
await client.close();
process.exit(0);
