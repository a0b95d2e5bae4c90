// A modern client of the TypeScript SDK 2.4.0 that is given a URL and nothing else: it signs in, and answers a question.
//
//     node oauth_client.mjs URL  ->  one line of JSON, as oauth_client.py; its token does not expire
import { createRequire } from 'node:module';
import { fileURLToPath } from 'node:url';

const modules = process.env.MRTR_NODE_MODULES ?? fileURLToPath(new URL('../../../.parts/node/node_modules', import.meta.url));
const require = createRequire(`${modules}/`);
const { Client, StreamableHTTPClientTransport, UnauthorizedError } = require('@modelcontextprotocol/client');

const url = new URL(process.argv[2]);
const redirect = 'http://127.0.0.1:9/callback';
const requested = [];
const asked = [];
const kept = { tokens: [] };
let cameBack;

async function recorded(address, options) {
    const response = await fetch(address, options);
    requested.push([options?.method ?? 'GET', String(address), response.status]);
    return response;
}

const provider = {
    redirectUrl: redirect,
    clientMetadata: { client_name: 'oauth-client', redirect_uris: [redirect], token_endpoint_auth_method: 'none' },
    clientInformation: () => kept.client,
    saveClientInformation: client => (kept.client = client),
    tokens: () => kept.tokens.at(-1),
    saveTokens: tokens => kept.tokens.push(tokens),
    codeVerifier: () => kept.verifier,
    saveCodeVerifier: verifier => (kept.verifier = verifier),
    discoveryState: () => kept.discovery,
    saveDiscoveryState: discovery => (kept.discovery = discovery),
    // The user's browser: it opens the page, and is sent to the client's own address at once.
    redirectToAuthorization: async address => {
        const response = await recorded(address, { redirect: 'manual' });
        cameBack = new URL(response.headers.get('location')).searchParams;
    },
};

async function connect(transport) {
    const client = new Client(
        { name: 'oauth-client', version: '1' },
        { versionNegotiation: { mode: 'auto' }, capabilities: { elicitation: { form: {} } } },
    );
    client.setRequestHandler('elicitation/create', async ({ params }) => {
        asked.push(params.message);
        return { action: 'accept', content: { name: 'Ada' } };
    });
    await client.connect(transport);
    return client;
}

const transport = () => new StreamableHTTPClientTransport(url, { authProvider: provider, fetch: recorded });
const first = transport();
try {
    await connect(first);
    throw new Error('it was let in without a token');
} catch (error) {
    if (!(error instanceof UnauthorizedError)) throw error;
}
await first.finishAuth(cameBack); // compares `iss` with the issuer that it knows
const client = await connect(transport());
const result = await client.callTool({ name: 'ask', arguments: {} });
const version = client.getNegotiatedProtocolVersion();
console.log(JSON.stringify({ text: result.content[0].text, version, asked, requested, tokens: kept.tokens.length }));
process.exit(0);
