// An old client for the tests: the TypeScript SDK 1.32 plays the calls that it is given, in one session.
//
//     node old_ts_client.mjs URL < calls.json     [["ask", {"question": "Who?"}], ...]
//
// It says Ann to every form, and prints a JSON list of the texts that it got. Packages come from MRTR_NODE_MODULES.
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';

const require = createRequire(`${process.env.MRTR_NODE_MODULES}/`);
const { Client } = require('@modelcontextprotocol/sdk/client/index.js');
const { StreamableHTTPClientTransport } = require('@modelcontextprotocol/sdk/client/streamableHttp.js');
const { ElicitRequestSchema } = require('@modelcontextprotocol/sdk/types.js');

const client = new Client({ name: 'old-ts', version: '1.32.2' }, { capabilities: { elicitation: {} } });
client.setRequestHandler(ElicitRequestSchema, async () => ({ action: 'accept', content: { name: 'Ann' } }));
await client.connect(new StreamableHTTPClientTransport(new URL(process.argv[2])));
const texts = [];
for (const [name, given] of JSON.parse(readFileSync(0, 'utf8'))) {
    texts.push((await client.callTool({ name, arguments: given })).content[0].text);
}
console.log(JSON.stringify(texts));
await client.close();
