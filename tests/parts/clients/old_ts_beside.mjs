// An old client for the tests: the TypeScript SDK 1.32 sends requests side by side, in one session.
//
//     node old_ts_beside.mjs [--sse] URL     {"id": 1, "tool": "echo", "arguments": {}}, {"id": 2, "subscribe": "a://b"}
//
// It reads one request a line, and prints one line for each that is answered, with its id and its text; an error is a
// text that begins with its code. The line 0 says that the session has begun. Packages come from MRTR_NODE_MODULES.
import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';

const require = createRequire(`${process.env.MRTR_NODE_MODULES}/`);
const { Client } = require('@modelcontextprotocol/sdk/client/index.js');
const { SSEClientTransport } = require('@modelcontextprotocol/sdk/client/sse.js');
const { StreamableHTTPClientTransport } = require('@modelcontextprotocol/sdk/client/streamableHttp.js');

const url = new URL(process.argv.at(-1));
const Transport = process.argv.includes('--sse') ? SSEClientTransport : StreamableHTTPClientTransport;
const client = new Client({ name: 'old-ts', version: '1.32.2' }, { capabilities: {} });
await client.connect(new Transport(url));

async function asked({ subscribe, tool, arguments: given }) {
    if (subscribe) {
        await client.subscribeResource({ uri: subscribe });
        return 'subscribed';
    }
    return (await client.callTool({ name: tool, arguments: given })).content[0].text;
}

async function play(wanted) {
    // The SDK puts `MCP error CODE: ` before the message.
    const text = await asked(wanted).catch((error) => `${error.code} ${error.message.replace(/^MCP error \S+ /, '')}`);
    console.log(JSON.stringify({ id: wanted.id, text }));
}

console.log(JSON.stringify({ id: 0, text: 'initialized' }));
const playing = [];
for await (const line of createInterface({ input: process.stdin })) playing.push(play(JSON.parse(line)));
await Promise.all(playing);
await client.close();
