// A modern client for the tests: the TypeScript client 2.4.0 with versionNegotiation 'auto', driven by JSON lines.
// The protocol is that of base.py. Packages come from MRTR_NODE_MODULES, since they are not installed beside this file.
import { AsyncLocalStorage } from 'node:async_hooks';
import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';

const modules = process.env.MRTR_NODE_MODULES ?? fileURLToPath(new URL('../../../.parts/node/node_modules', import.meta.url));
const require = createRequire(`${modules}/`);
const { Client, StreamableHTTPClientTransport } = require('@modelcontextprotocol/client');

const DEFAULT_ROOTS = [{ uri: 'file:///project', name: 'project' }];
const LOG_LEVEL_KEY = 'io.modelcontextprotocol/logLevel';
const SAMPLED = { role: 'assistant', model: 'test-model', content: { type: 'text', text: 'sampled' }, stopReason: 'endTurn' };

// What one command may answer, and what it saw.
class Call {
    asked = [];
    progress = [];
    logs = [];

    constructor(command) {
        this.answers = [...(command.answers ?? [])];
    }

    seen() {
        return { asked: this.asked, progress: this.progress, logs: this.logs };
    }
}

// The events of the one subscription, in the words of the Python SDK.
class Heard {
    events = [];
    ended = null;
    changed = () => undefined;

    hear(event) {
        this.events.push(event);
        this.changed();
    }

    async wait(count = Infinity) {
        while (this.events.length < count && this.ended === null) await new Promise(resolve => (this.changed = resolve));
        return { events: this.events.splice(0, count), ended: this.ended };
    }
}

const EVENTS = {
    'notifications/tools/list_changed': 'ToolsListChanged',
    'notifications/prompts/list_changed': 'PromptsListChanged',
    'notifications/resources/list_changed': 'ResourcesListChanged',
    'notifications/resources/updated': 'ResourceUpdated'
};

const current = new AsyncLocalStorage();
const calls = new Set();
let client;
let heard = new Heard();

async function listen(filter) {
    const mine = (heard = new Heard());
    for (const [method, name] of Object.entries(EVENTS)) {
        client.setNotificationHandler(method, ({ params }) => mine.hear([name, params?.uri ?? '']));
    }
    const subscription = await client.listen(filter);
    void subscription.closed.then(how => {
        mine.ended = how;
        mine.changed();
    });
    return subscription.honoredFilter;
}

async function answer(kind, context, params = {}) {
    // On a modern connection callbacks run inside the call; on a legacy one no call is known, and the oldest is a guess.
    const call = current.getStore() ?? [...calls][0] ?? new Call({});
    call.asked.push({ kind, key: String(context.mcpReq.id), params });
    const rule = call.answers.find(it => it.kind === kind && JSON.stringify(params).includes(it.match ?? ''));
    if (rule === undefined) return defaultAnswer(kind, params);
    call.answers.splice(call.answers.indexOf(rule), 1);
    // The SDK waits for the callback even when the call was aborted, unless the callback watches its signal.
    await sleep((rule.delay_seconds ?? 0) * 1000, undefined, { signal: context.mcpReq.signal });
    if (rule.reply?.error !== undefined) throw new Error(rule.reply.error);
    return rule.reply ?? defaultAnswer(kind, params);
}

function defaultAnswer(kind, params) {
    if (kind === 'sample') return SAMPLED;
    if (kind === 'roots') return { roots: DEFAULT_ROOTS };
    if (params.mode === 'url') return { action: 'accept' };
    return { action: 'accept', content: fill(params.requestedSchema ?? {}) };
}

// Fills a form: Ann for a name, else the least that is valid for each required field.
function fill({ properties = {}, required = [] }) {
    const wanted = new Set(required);
    if (properties.name?.type === 'string') wanted.add('name');
    return Object.fromEntries([...wanted].map(name => [name, name === 'name' ? 'Ann' : least(properties[name] ?? {})]));
}

function least(field) {
    const choices = field.enum ?? field.oneOf?.map(option => option.const);
    if (choices) return choices[0];
    if (field.type === 'boolean') return true;
    if (field.type === 'integer' || field.type === 'number') return field.minimum ?? 1;
    if (field.type === 'array') {
        const options = field.items?.enum ?? field.items?.anyOf?.map(option => option.const) ?? [];
        return options.slice(0, field.minItems ?? 1);
    }
    const samples = { email: 'ann@example.com', uri: 'https://example.com/', date: '2026-11-21', 'date-time': '2026-11-21T00:00:00Z' };
    return (samples[field.format] ?? 'text').padEnd(field.minLength ?? 0, 'x');
}

function explain(error) {
    // An SdkError's code is a word, such as REQUEST_TIMEOUT: only a JSON-RPC code goes into `code`.
    const code = typeof error.code === 'number' ? error.code : null;
    const type = code === null && typeof error.code === 'string' ? `${error.name}:${error.code}` : error.name;
    const cause = error.cause === undefined ? '' : ` (cause: ${error.cause?.message ?? error.cause})`;
    return { type, message: `${error.message ?? error}${cause}`, code, data: error.data ?? null };
}

async function connect(command) {
    await client?.close();
    const capabilities = command.declares ? { elicitation: { form: {}, url: {} }, sampling: { tools: {} }, roots: {} } : {};
    client = new Client({ name: 'ts-client', version: '2.4.0' }, { capabilities, versionNegotiation: { mode: 'auto' } });
    client.onerror = error => console.error('onerror', error);
    const handle = (method, kind) => client.setRequestHandler(method, (request, context) => answer(kind, context, request.params));
    if (command.declares) {
        handle('elicitation/create', 'elicit');
        handle('sampling/createMessage', 'sample');
        handle('roots/list', 'roots');
    }
    client.setNotificationHandler('notifications/message', ({ params }) => {
        for (const call of calls) call.logs.push(params); // the SDK does not say whose it is
    });
    await client.connect(new StreamableHTTPClientTransport(new URL(command.url), { requestInit: { headers: command.headers } }));
    return {
        protocolVersion: client.getNegotiatedProtocolVersion(),
        era: client.getProtocolEra(),
        serverInfo: client.getServerVersion() ?? null,
        capabilities: client.getServerCapabilities() ?? null,
        instructions: client.getInstructions() ?? null
    };
}

function perform(command, call, signal) {
    const options = { signal, ...(command.progress && { onprogress: progress => call.progress.push(progress) }) };
    const meta = command.log_level && { _meta: { [LOG_LEVEL_KEY]: command.log_level } };
    const named = { name: command.name, ...(command.arguments && { arguments: command.arguments }), ...meta };
    switch (command.op) {
        case 'call_tool':
        case 'cancel_call':
            return client.callTool(named, options);
        case 'get_prompt':
            return client.getPrompt(named, options);
        case 'read_resource':
            return client.readResource({ uri: command.uri }, options);
        case 'complete':
            return client.complete({ ref: command.ref, argument: command.argument }, options);
        // Without a cursor the SDK itself walks every page.
        case 'list_tools':
            return client.listTools(undefined, options);
        case 'list_prompts':
            return client.listPrompts(undefined, options);
        case 'list_resources':
            return client.listResources(undefined, options);
        case 'list_resource_templates':
            return client.listResourceTemplates(undefined, options);
        case 'listen':
            return listen(command.notifications);
        case 'heard':
            return heard.wait(command.count);
        default:
            throw new Error(`no such op: ${command.op}`);
    }
}

async function outcome(command, signal = undefined) {
    if (client === undefined) return { error: explain(new Error('not connected')) };
    const call = new Call(command);
    calls.add(call);
    try {
        const result = await current.run(call, () => perform(command, call, signal));
        return { result, ...call.seen() };
    } catch (error) {
        return { error: explain(error), ...call.seen() };
    } finally {
        calls.delete(call);
    }
}

async function cancelCall(command) {
    const controller = new AbortController();
    const work = outcome({ ...command, progress: true }, controller.signal);
    const finished = await Promise.race([work.then(() => true), sleep(command.after_seconds * 1000, false)]);
    if (!finished) controller.abort('the user cancelled');
    const { error, ...rest } = await work;
    return finished ? { ...rest, ...(error && { error }), cancelled: false } : { result: {}, ...rest, cancelled: true };
}

async function obey(command) {
    switch (command.op) {
        case 'connect':
            return { result: await connect(command) };
        case 'close':
            await client?.close();
            client = undefined;
            return { result: {} };
        case 'cancel_call':
            return cancelCall(command);
        case 'call_many':
            return { result: await Promise.all(command.calls.map(call => outcome({ ...call, op: 'call_tool' }))) };
        default:
            return outcome(command);
    }
}

async function reply(command) {
    let answered;
    try {
        answered = await obey(command);
    } catch (error) {
        answered = { error: explain(error) };
    }
    process.stdout.write(`${JSON.stringify({ id: command.id, ok: !('error' in answered), ...answered })}\n`);
}

process.on('unhandledRejection', error => console.error('unhandled', error));
const lines = createInterface({ input: process.stdin });
lines.on('line', line => void reply(JSON.parse(line)));
lines.on('close', () => process.exit(0)); // the parent has closed stdin or is dead
