"""The OAuth of upstreams under the URL of the gateway, for routes over HTTP."""
