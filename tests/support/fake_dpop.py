"""FAKE proofs of possession (RFC 9449), without signatures, and what a server that demands them says."""

import base64
import itertools
import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from tests.support.fake_modern import FakeModern
from tests.support.fake_upstream import FakeUpstream
from tests.support.served import Served

TOKEN = "DPoP token-of-ann"
CHALLENGE = 'DPoP algs="ES256", error="use_dpop_nonce"'
_PROOFS = itertools.count(1)


def proof(url: str, leg: str, nonce: str | None = None, method: str = "POST") -> str:
    """A proof for one request of a client to this URL; `leg` names the request."""
    claims = {"jti": f"proof-{next(_PROOFS)}", "htm": method, "htu": url, "iat": 0, "leg": leg}
    return f"{_part({'typ': 'dpop+jwt', 'alg': 'ES256'})}.{_part(claims | ({'nonce': nonce} if nonce else {}))}.c2ln"


def proven(url: str, leg: str, nonce: str | None = None, method: str = "POST") -> dict[str, str]:
    """The headers of such a request."""
    return {"Authorization": TOKEN, "DPoP": proof(url, leg, nonce, method)}


def leg_of(headers: Mapping[str, str]) -> str:
    """The leg whose proof a request has; empty without one."""
    return str(_claims(headers).get("leg", ""))


def refusal(headers: Mapping[str, str], url: str, nonce: str | None) -> dict[str, str] | None:
    """The headers of the 401 to a request; None if its proof is for this URL, and has the nonce."""
    claims = _claims(headers)
    if headers.get("Authorization") == TOKEN and (claims.get("htu"), claims.get("nonce")) == (url, nonce):
        return None
    return {"WWW-Authenticate": CHALLENGE} | ({} if nonce is None else {"DPoP-Nonce": nonce})


def _part(content: Mapping[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")


def _claims(headers: Mapping[str, str]) -> dict[str, Any]:
    part = headers.get("DPoP", "").split(".")[1:2]
    found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(part[0] + "==")) if part else {}
    return found


class DemandsProofs(Served):
    """Makes a FAKE server serve no request without a proof for the URL that its clients know."""

    def __init__(self) -> None:
        super().__init__()
        self.public_url = ""
        self.nonce: str | None = None
        """What each proof must have."""

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        headers = refusal(http.headers, self.public_url, self.nonce)
        return await super().handle(http) if headers is None else web.Response(status=401, headers=headers)


class FakeDpopUpstream(DemandsProofs, FakeUpstream):
    """A FAKE legacy server."""

    def legs(self) -> list[tuple[str, str]]:
        """What it was sent, with the leg whose proof came with it."""
        return [(seen.word, leg_of(seen.headers)) for seen in self.seen]


class FakeDpopModern(DemandsProofs, FakeModern):
    """A FAKE modern server."""

    def legs(self, method: str) -> list[str]:
        """The legs whose proofs came with the requests of this method."""
        found = zip(self.requests, self.headers, strict=True)
        return [leg_of(headers) for body, headers in found if body["method"] == method]
