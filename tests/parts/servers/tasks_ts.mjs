// An old server (protocol 2025-11-25) on the TypeScript SDK 1.32 whose tools are tasks: those that the official suite
// asks for in its scenarios tasks-*, and a few for the traps that real servers set.
//
//     node tasks_ts.mjs [--port P] [--ledger FILE]
import { randomUUID } from 'node:crypto';
import { appendFileSync } from 'node:fs';
import { createServer } from 'node:http';
import { createRequire } from 'node:module';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

const modules = process.env.MRTR_NODE_MODULES ?? fileURLToPath(new URL('../../../.parts/node/node_modules', import.meta.url));
const require = createRequire(`${modules}/`);
const { McpServer } = require('@modelcontextprotocol/sdk/server/mcp.js');
const { StreamableHTTPServerTransport } = require('@modelcontextprotocol/sdk/server/streamableHttp.js');
const { InMemoryTaskStore, InMemoryTaskMessageQueue } = require('@modelcontextprotocol/sdk/experimental/tasks');
const { ElicitResultSchema } = require('@modelcontextprotocol/sdk/types.js');
const { z } = require('zod');

const { values: flags } = parseArgs({ options: { port: { type: 'string', default: '0' }, ledger: { type: 'string' } } });
const taskStore = new InMemoryTaskStore();
const taskMessageQueue = new InMemoryTaskMessageQueue();

function record(event, tool, more = {}) {
    if (flags.ledger) appendFileSync(flags.ledger, `${JSON.stringify({ t: Date.now() / 1000, event, tool, ...more })}\n`);
}

const text = value => ({ content: [{ type: 'text', text: value }] });
const form = (message, title, properties) => ({
    method: 'elicitation/create',
    params: { mode: 'form', message, requestedSchema: { type: 'object', title, properties, required: Object.keys(properties) } }
});
const CONFIRM = { confirm: { type: 'boolean', title: 'Confirm' } };
const NAME = { name: { type: 'string', title: 'Name' } };

function buildServer() {
    const server = new McpServer(
        { name: 'old-tasks-ts', version: '1.0.0' },
        {
            capabilities: { tools: {}, tasks: { list: {}, cancel: {}, requests: { tools: { call: {} } } } },
            taskStore,
            taskMessageQueue
        }
    );
    server.registerTool('greet', { inputSchema: { name: z.string() } }, async ({ name }) => text(`Hello, ${name}!`));

    function task(name, taskSupport, inputSchema, work, before = async () => undefined) {
        server.experimental.tasks.registerToolTask(
            name,
            { inputSchema, execution: { taskSupport } },
            {
                createTask: async (args, extra) => {
                    const early = await before(args, extra);
                    const task = await extra.taskStore.createTask({ ttl: extra.taskRequestedTtl ?? 60000, pollInterval: 500 });
                    const { taskId } = task;
                    record('run', name, { task: taskId, session: extra.sessionId, arguments: args });
                    const ask = request => extra.sendRequest(request, ElicitResultSchema, { relatedTask: { taskId } });
                    const settle = async (status, result) => {
                        record('finished', name, { task: taskId, status });
                        if ((await extra.taskStore.getTask(taskId)).status !== 'cancelled') await extra.taskStore.storeTaskResult(taskId, status, result);
                    };
                    work(args, { ask, early, extra, taskId })
                        .then(result => settle(result.isError ? 'failed' : 'completed', result))
                        .catch(async error => {
                            record('failed', name, { task: taskId, message: String(error.message) });
                            await extra.taskStore.updateTaskStatus(taskId, 'failed', error.message).catch(() => undefined);
                        });
                    return { task };
                },
                getTask: async (_args, extra) => extra.taskStore.getTask(extra.taskId),
                getTaskResult: async (_args, extra) => extra.taskStore.getTaskResult(extra.taskId)
            }
        );
    }

    task('slow_compute', 'optional', { seconds: z.number(), label: z.string().optional() }, async ({ seconds, label }) => {
        await sleep(seconds * 1000);
        return text(`computed ${label ?? ''}`);
    });
    task('failing_job', 'required', {}, async () => {
        await sleep(300);
        return { ...text('the job failed'), isError: true };
    });
    task('protocol_error_job', 'optional', {}, async () => {
        await sleep(100);
        throw new Error('the job broke');
    });
    const confirm = async ({ filename }, { ask }) => {
        const answer = await ask(form(`Delete ${filename}?`, 'Confirm', CONFIRM));
        record('answered', 'confirm_delete', { result: answer });
        return text(answer.content?.confirm ? `deleted ${filename}` : `kept ${filename}`);
    };
    task('confirm_delete', 'optional', { filename: z.string() }, confirm);
    task('must_confirm', 'required', { filename: z.string() }, confirm);
    task('multi_input', 'optional', {}, async (_args, { ask }) => {
        const [name, sure] = await Promise.all([ask(form('Who?', 'Name', NAME)), ask(form('Sure?', 'Sure', CONFIRM))]);
        return text(`${name.content?.name}: ${sure.content?.confirm}`);
    });
    task('ask_twice', 'required', {}, async (_args, { ask }) => {
        const first = await ask(form('First?', 'First', NAME));
        const second = await ask(form('Second?', 'Second', NAME));
        return text(`${first.content?.name}, ${second.content?.name}`);
    });
    task(
        'test_tool_with_task',
        'required',
        {},
        async (_args, { early }) => {
            await sleep(50);
            return text(`Hello, ${early}!`);
        },
        async (_args, extra) => {
            const answer = await extra.sendRequest(form('What is your name?', 'user_name', NAME), ElicitResultSchema);
            return answer.content?.name;
        }
    );
    return server;
}

const sessions = new Map();

async function openSession() {
    const transport = new StreamableHTTPServerTransport({
        sessionIdGenerator: randomUUID,
        onsessioninitialized: id => void sessions.set(id, transport)
    });
    transport.onclose = () => {
        record('closed', 'session', { session: transport.sessionId });
        sessions.delete(transport.sessionId);
    };
    await buildServer().connect(transport);
    return transport;
}

const http = createServer(async (request, response) => {
    const id = request.headers['mcp-session-id'];
    const known = id === undefined ? request.method === 'POST' : sessions.has(id);
    if (!known) {
        response.writeHead(id === undefined ? 400 : 404, { 'content-type': 'application/json' });
        return response.end(JSON.stringify({ jsonrpc: '2.0', error: { code: -32001, message: 'Session not found' }, id: null }));
    }
    const transport = id === undefined ? await openSession() : sessions.get(id);
    await transport.handleRequest(request, response);
});

// A late answer to a question nobody waits for any more must not end the process.
process.on('unhandledRejection', error => console.error('unhandled', error));
http.listen(Number(flags.port), '127.0.0.1', () => console.log(`READY http://127.0.0.1:${http.address().port}/mcp`));
