"""An issuer of tokens for one test: its keys, its JWKS, and valid or invalid signatures."""

import json
import time
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

ISSUER = "https://as.example"
ADA: dict[str, Any] = {"iss": ISSUER, "sub": "ada", "client_id": "app"}
RSA = rsa.generate_private_key(65537, 2048)


def private(algorithm: str) -> Any:
    """A key for that algorithm; RSA ones are slow to make, so there is one."""
    if algorithm == "EdDSA":
        return ed25519.Ed25519PrivateKey.generate()
    if algorithm == "ES256":
        return ec.generate_private_key(ec.SECP256R1())
    if algorithm == "ES384":
        return ec.generate_private_key(ec.SECP384R1())
    return RSA


def public_jwk(key: Any, kid: str | None = "k1", **more: Any) -> dict[str, Any]:
    """One entry of a JWKS."""
    kind: Any = OKPAlgorithm
    if isinstance(key, rsa.RSAPrivateKey):
        kind = RSAAlgorithm
    elif isinstance(key, ec.EllipticCurvePrivateKey):
        kind = ECAlgorithm
    entry: dict[str, Any] = json.loads(kind.to_jwk(key.public_key()))
    entry.pop("key_ops", None)
    return entry | ({} if kid is None else {"kid": kid}) | more


def jwks(*entries: dict[str, Any]) -> str:
    return json.dumps({"keys": list(entries)})


def token(key: Any, algorithm: str = "ES256", headers: dict[str, Any] | None = None, **claims: Any) -> str:
    """A token of Ada's with these changes of claims; None removes one."""
    now = int(time.time())
    body = {**ADA, "iat": now, "exp": now + 300, **claims}
    body = {name: value for name, value in body.items() if value is not None}
    return jwt.encode(body, key, algorithm, headers={"kid": "k1", **(headers or {})})
