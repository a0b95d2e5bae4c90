"""Verifies bearer tokens (JWT, RFC 7519 with RFC 9068) with the keys of their issuer (JWKS, RFC 7517).

Rule 1: nothing in a token is trusted until its signature is verified, least of all `alg` or `kid`. The algorithm must
fit the type of the key. None with a shared secret is known here: an attacker could use a public key as the secret.
Rule 2: errors never quote a token.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from gateway.identity.principal import of_claims

LEEWAY_SECONDS: Final = 30
"""How far the issuer's clock may differ."""
MAX_TOKEN_CHARACTERS: Final = 16_384
_MAX_KEYS: Final = 100
_MAX_KID_CHARACTERS: Final = 256
_MIN_RSA_BITS: Final = 2048  # RFC 7518 section 3.3

_PublicKey = rsa.RSAPublicKey | ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey | ed448.Ed448PublicKey
_RSA: Final = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"})
_CURVES: Final = {"ES256": "secp256r1", "ES384": "secp384r1", "ES512": "secp521r1"}
_ALGORITHMS: Final = {*_RSA, *_CURVES, "EdDSA"}


class BadToken(Exception):
    """The token is not accepted; the text is one sentence for the client, without quotes."""


class _Jwks(msgspec.Struct):
    keys: list[Any]


class Key(NamedTuple):
    """One public key of an issuer."""

    id: str | None
    algorithms: frozenset[str]
    """Those that fit its type; if the issuer names one, no other."""
    public: _PublicKey


class Verified(NamedTuple):
    """The principal of a verified token, and when it expires (wall clock, seconds)."""

    principal: bytes
    expires: float


def read_keys(text: bytes | str) -> tuple[Key, ...]:
    """Return the keys of a JWKS that can verify signatures; raises ValueError if there are none."""
    try:
        found = msgspec.json.decode(text, type=_Jwks)
    except (ValueError, RecursionError) as exc:
        raise ValueError('is not a JWKS, which is JSON with a list "keys"') from exc
    keys = tuple(key for key in map(_key, found.keys[:_MAX_KEYS]) if key is not None)
    if not keys:
        raise ValueError("has no public key that can verify signatures (RSA of 2048 bits or more, EC, OKP)")
    return keys


def _key(entry: object) -> Key | None:
    """One entry of a JWKS; None for an unknown kind, which must be ignored (RFC 7517 section 5)."""
    if not isinstance(entry, dict) or entry.get("use", "sig") != "sig":
        return None
    id_, algorithm = entry.get("kid"), entry.get("alg")
    if not (isinstance(id_, str | None) and isinstance(algorithm, str | None)):
        return None
    kinds: Mapping[Any, Any] = {"RSA": RSAAlgorithm, "EC": ECAlgorithm, "OKP": OKPAlgorithm}
    try:
        public = kinds[entry["kty"]].from_jwk(entry)
    except (jwt.InvalidKeyError, ValueError, TypeError, KeyError, ArithmeticError):
        return None
    match public:
        case rsa.RSAPublicKey() if public.key_size >= _MIN_RSA_BITS:
            fitting = _RSA
        case ec.EllipticCurvePublicKey():
            fitting = frozenset(name for name, curve in _CURVES.items() if curve == public.curve.name)
        case ed25519.Ed25519PublicKey() | ed448.Ed448PublicKey():
            fitting = frozenset({"EdDSA"})
        case _:  # a published private key must not be trusted
            return None
    return Key(id_, fitting if algorithm is None else fitting & {algorithm}, public)


def verify(token: str, keys: Sequence[Key], issuer: str, audience: Sequence[str]) -> Verified | None:
    """Return the verified principal of a token; None if no key fits, but newer keys could. Raises BadToken."""
    if len(token) > MAX_TOKEN_CHARACTERS:
        raise BadToken("The token is too long")
    try:
        header = jwt.get_unverified_header(token)
    except (jwt.InvalidTokenError, ValueError, RecursionError) as exc:
        raise BadToken("The token is not a JWT") from exc
    algorithm, id_ = header.get("alg"), header.get("kid")
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise BadToken("The token has a signature algorithm that is not accepted here")
    if "crit" in header:  # what is not understood must be refused (RFC 7515 section 4.1.11)
        raise BadToken("The token has a critical header that is not supported")
    if not isinstance(id_, str | None) or len(id_ or "") > _MAX_KID_CHARACTERS:
        raise BadToken("The token has a malformed key id")
    fitting = [key for key in keys if algorithm in key.algorithms]
    named = fitting if id_ is None else [key for key in fitting if key.id == id_]
    # Among several keys, a token has to name its own (OpenID Connect Core 1.0 section 10.1).
    if not named or (id_ is None and len(named) > 1):
        return None
    claims = _claims(token, named[0].public, algorithm, issuer, audience)
    client = claims.get("client_id") or claims.get("azp") or ""
    if not (isinstance(client, str) and claims["sub"]):
        raise BadToken("The token has no valid subject or client id")
    try:
        return Verified(of_claims(claims["iss"], claims["sub"], client), float(claims["exp"]))
    except UnicodeEncodeError as exc:  # an unpaired surrogate
        raise BadToken("The token has no valid subject or client id") from exc
    except OverflowError as exc:
        raise BadToken("The token has an expiry that is out of range") from exc


def _claims(token: str, key: _PublicKey, algorithm: str, issuer: str, audience: Sequence[str]) -> Mapping[str, Any]:
    try:
        return jwt.decode(
            token,
            key,
            algorithms=[algorithm],
            issuer=issuer,
            audience=list(audience) or None,
            leeway=LEEWAY_SECONDS,
            # By itself, PyJWT lets a token without `exp` pass, and refuses any `aud` if no audience is given.
            options={"require": ["exp", "iss", "sub"], "verify_aud": bool(audience)},
        )
    except jwt.ExpiredSignatureError as exc:
        raise BadToken("The token has expired") from exc
    except (jwt.ImmatureSignatureError, jwt.InvalidIssuedAtError) as exc:
        raise BadToken("The token is not valid yet") from exc
    except jwt.InvalidIssuerError as exc:
        raise BadToken("The token is from another issuer") from exc
    except jwt.InvalidAudienceError as exc:
        raise BadToken("The token is for another audience") from exc
    except jwt.MissingRequiredClaimError as exc:
        raise BadToken(f"The token lacks the claim {exc.claim}") from exc
    except (jwt.InvalidTokenError, ValueError, ArithmeticError, RecursionError) as exc:
        raise BadToken("The token is not signed by its issuer") from exc
