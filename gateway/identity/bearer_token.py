"""Verifies bearer tokens (JWT, RFC 7519 and 9068) with the keys of their issuer (JWKS, RFC 7517); pure but for time.

Rule 1: everything of a token is hostile until its signature is verified, `alg` and `kid` above all. The algorithm is
taken from the configuration's list, which has none with a shared secret, and must fit the kind of the key.
Rule 2: nothing of a token is in an error.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from gateway.identity.principal import of_claims

LEEWAY_SECONDS: Final = 30
"""How far the issuer's clock may be from ours."""
MAX_TOKEN_CHARACTERS: Final = 16_384
_MAX_KEYS: Final = 100
_MAX_KID_CHARACTERS: Final = 256
_MIN_RSA_BITS: Final = 2048

_PublicKey = rsa.RSAPublicKey | ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey | ed448.Ed448PublicKey
_CURVES: Final = {"ES256": "secp256r1", "ES384": "secp384r1", "ES512": "secp521r1"}


class BadToken(Exception):
    """The token is not accepted; its text is one sentence for the client, without quotes."""


class UnknownKey(BadToken):
    """No key fits: the issuer may have a new one."""


class _Jwks(msgspec.Struct):
    keys: list[Any]


class Key(NamedTuple):
    """One public key of an issuer."""

    id: str | None
    algorithm: str | None
    """The only one that it is for, where the issuer says so."""
    public: _PublicKey


class Verified(NamedTuple):
    """Who a token is of, and until when (wall clock, seconds)."""

    principal: bytes
    expires: float


def read_keys(text: bytes | str) -> tuple[Key, ...]:
    """Return the keys of a JWKS that can verify signatures; ValueError where it is none, or has none."""
    try:
        found = msgspec.json.decode(text, type=_Jwks)
    except (ValueError, RecursionError) as exc:
        raise ValueError('is no JWKS, which is JSON with a list "keys"') from exc
    keys = tuple(key for key in map(_key, found.keys[:_MAX_KEYS]) if key is not None)
    if not keys:
        raise ValueError("has no public key that can verify signatures (RSA of 2048 bits or more, EC, OKP)")
    return keys


def _key(entry: object) -> Key | None:
    """One entry of a JWKS; None for what is not understood, which is to be passed over (RFC 7517 section 5)."""
    if not isinstance(entry, dict) or entry.get("use", "sig") != "sig":
        return None
    id_, algorithm, type_ = entry.get("kid"), entry.get("alg"), entry.get("kty")
    if not (isinstance(id_, str | None) and isinstance(algorithm, str | None) and isinstance(type_, str)):
        return None
    kinds: Mapping[Any, Any] = {"RSA": RSAAlgorithm, "EC": ECAlgorithm, "OKP": OKPAlgorithm}
    kind = kinds.get(type_)
    if kind is None:
        return None
    try:
        public = kind.from_jwk(entry)
    except (jwt.InvalidKeyError, ValueError, TypeError, KeyError, ArithmeticError):
        return None
    if isinstance(public, rsa.RSAPublicKey) and public.key_size < _MIN_RSA_BITS:
        return None
    # A private key has been seen by everybody, and is nobody's to trust.
    return Key(id_, algorithm, public) if isinstance(public, _PublicKey) else None


def verify(
    token: str, keys: Sequence[Key], algorithms: Sequence[str], issuer: str, audience: Sequence[str]
) -> Verified:
    """Return whose token it is. Raises BadToken, and UnknownKey where other keys could help."""
    if len(token) > MAX_TOKEN_CHARACTERS:
        raise BadToken("The token is too long")
    try:
        header = jwt.get_unverified_header(token)
    except (jwt.InvalidTokenError, ValueError, RecursionError) as exc:
        raise BadToken("The token is no JWT") from exc
    algorithm, id_ = header.get("alg"), header.get("kid")
    if not isinstance(algorithm, str) or algorithm not in algorithms:
        raise BadToken("The signature is of a kind that is not accepted here")
    if "crit" in header:
        raise BadToken("The token has a header that must be understood and is not")
    if not isinstance(id_, str | None) or len(id_ or "") > _MAX_KID_CHARACTERS:
        raise BadToken("The token names its key in no known way")
    claims = _claims(token, _chosen(keys, algorithm, id_), algorithm, issuer, audience)
    client = claims.get("client_id") or claims.get("azp") or ""
    if not (isinstance(client, str) and claims["sub"]):
        raise BadToken("The token does not say who it is of")
    return Verified(of_claims(claims["iss"], claims["sub"], client), float(claims["exp"]))


def _chosen(keys: Sequence[Key], algorithm: str, id_: str | None) -> _PublicKey:
    fitting = [key for key in keys if key.algorithm in (None, algorithm) and _fits(key.public, algorithm)]
    named = fitting if id_ is None else [key for key in fitting if key.id == id_]
    if not named or (id_ is None and len(named) > 1):
        raise UnknownKey("The token is of a key that its issuer does not have")
    return named[0].public


def _fits(public: _PublicKey, algorithm: str) -> bool:
    if isinstance(public, rsa.RSAPublicKey):
        return algorithm[:2] in {"RS", "PS"}
    if isinstance(public, ec.EllipticCurvePublicKey):
        return _CURVES.get(algorithm) == public.curve.name
    return algorithm == "EdDSA"


def _claims(token: str, key: _PublicKey, algorithm: str, issuer: str, audience: Sequence[str]) -> Mapping[str, Any]:
    try:
        return jwt.decode(
            token,
            key,
            algorithms=[algorithm],
            issuer=issuer,
            audience=list(audience) or None,
            leeway=LEEWAY_SECONDS,
            options={"require": ["exp", "iss", "sub"], "verify_aud": bool(audience)},
        )
    except jwt.ExpiredSignatureError as exc:
        raise BadToken("The token has expired") from exc
    except (jwt.ImmatureSignatureError, jwt.InvalidIssuedAtError) as exc:
        raise BadToken("The token is not valid yet") from exc
    except jwt.InvalidIssuerError as exc:
        raise BadToken("The token is of another issuer") from exc
    except jwt.InvalidAudienceError as exc:
        raise BadToken("The token is for another audience") from exc
    except jwt.MissingRequiredClaimError as exc:
        raise BadToken(f"The token lacks the claim {exc.claim}") from exc
    except (jwt.InvalidTokenError, ValueError, ArithmeticError, RecursionError) as exc:
        raise BadToken("The token is not signed by its issuer") from exc
