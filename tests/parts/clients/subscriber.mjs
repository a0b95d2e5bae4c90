// A legacy client on the TypeScript SDK 1.x that subscribes to one resource over streamable HTTP, then listens.
//
//     node subscriber.mjs URL RESOURCE
//
// It prints what subscriber.py prints. Packages come from MRTR_NODE_MODULES.
import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';

const require = createRequire(`${process.env.MRTR_NODE_MODULES}/`);
const { Client } = require('@modelcontextprotocol/sdk/client/index.js');
const { StreamableHTTPClientTransport } = require('@modelcontextprotocol/sdk/client/streamableHttp.js');
const { ResourceUpdatedNotificationSchema } = require('@modelcontextprotocol/sdk/types.js');

const [url, uri] = process.argv.slice(2);
const client = new Client({ name: 'subscriber', version: '1' }, { capabilities: {} });
client.setNotificationHandler(ResourceUpdatedNotificationSchema, message => console.log(message.params.uri));
await client.connect(new StreamableHTTPClientTransport(new URL(url)));
await client.subscribeResource({ uri });
console.log('subscribed');
for await (const _ of createInterface({ input: process.stdin })) await client.callTool({ name: 'touch', arguments: {} });
process.exit(0);
