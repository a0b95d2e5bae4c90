"""Bearer tokens: what is verified, and what a hostile one cannot do."""

import base64
import hmac
import json
import time
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from gateway.identity.jwt_verification import BadToken, read_keys, verify
from gateway.identity.principal import of_claims
from tests.support.signer import ISSUER, RSA, jwks, private, public_jwk, token

KEY = private("ES256")
KEYS = read_keys(jwks(public_jwk(KEY)))
ALGORITHMS = ("RS256", "RS512", "PS256", "ES256", "ES384", "EdDSA")


def principal(text: str, keys: Any = KEYS, audience: tuple[str, ...] = ()) -> bytes:
    return verify(text, keys, ISSUER, audience).principal


def part(value: Any) -> str:
    return (
        base64.urlsafe_b64encode(value if isinstance(value, bytes) else json.dumps(value).encode())
        .decode()
        .rstrip("=")
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_good_token_is_its_claims(algorithm: str) -> None:
    key = private(algorithm)
    keys = read_keys(jwks(public_jwk(key)))
    exp = int(time.time()) + 100
    verified = verify(token(key, algorithm, exp=exp), keys, ISSUER, ())
    assert verified.principal == of_claims(ISSUER, "ada", "app")
    assert verified.expires == exp
    assert principal(token(key, algorithm, client_id=None, azp="app"), keys) == verified.principal


NOW = int(time.time())
BAD_CLAIMS: list[tuple[dict[str, Any], str]] = [
    ({"exp": NOW - 31}, "has expired"),
    ({"exp": None}, "lacks the claim exp"),
    ({"exp": "never"}, "not signed by its issuer"),
    ({"nbf": NOW + 100_000}, "not valid yet"),
    ({"iss": "https://evil.example"}, "another issuer"),
    ({"iss": f"{ISSUER}/"}, "another issuer"),
    ({"iss": None}, "lacks the claim iss"),
    ({"sub": None}, "lacks the claim sub"),
    ({"sub": ""}, "no valid subject or client id"),
    ({"client_id": ["app"]}, "no valid subject or client id"),
    ({"sub": "\ud800"}, "no valid subject or client id"),
    ({"client_id": "a\udfff"}, "no valid subject or client id"),
    ({"exp": 10**400}, "an expiry that is out of range"),
]


@pytest.mark.parametrize(("claims", "why"), BAD_CLAIMS)
def test_a_bad_claim_is_refused(claims: dict[str, Any], why: str) -> None:
    with pytest.raises(BadToken, match=why):
        principal(token(KEY, **claims))


def test_clocks_may_be_half_a_minute_apart() -> None:
    assert principal(token(KEY, exp=int(time.time()) - 20, nbf=int(time.time()) + 20))


def test_the_audience_counts_where_one_is_configured() -> None:
    assert principal(token(KEY, aud="other"))
    assert principal(token(KEY, aud=["other", "us"]), audience=("them", "us"))
    for claims in ({"aud": "other"}, {}):
        with pytest.raises(BadToken, match=r"another audience|lacks the claim aud"):
            principal(token(KEY, **claims), audience=("us",))


def test_a_public_key_is_no_shared_secret() -> None:
    """The classic: HS256 with the bytes of the public key, which everybody has."""
    public = RSA.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    signed = f"{part({'alg': 'HS256', 'kid': 'k1'})}.{part({'iss': ISSUER, 'sub': 'ada', 'exp': NOW + 9_999})}"
    forged = f"{signed}.{part(hmac.digest(public, signed.encode(), 'sha256'))}"
    keys = read_keys(jwks(public_jwk(RSA)))
    with pytest.raises(BadToken):
        verify(forged, keys, ISSUER, ())


def test_no_signature_is_none() -> None:
    body = part({"iss": ISSUER, "sub": "ada", "exp": NOW + 9_999})
    for name in ("none", "None", "nOnE", "", None, ["ES256"], {"ES256": 1}):
        with pytest.raises(BadToken):
            principal(f"{part({'alg': name, 'kid': 'k1'})}.{body}.")


def test_a_signature_of_another_is_refused() -> None:
    with pytest.raises(BadToken, match="not signed by its issuer"):
        principal(token(private("ES256")))
    head, body, sealed = token(KEY).split(".")
    for changed in (f"{head}.{part({'iss': ISSUER, 'sub': 'eve', 'exp': NOW + 9_999})}.{sealed}", f"{head}.{body}."):
        with pytest.raises(BadToken, match="not signed by its issuer"):
            principal(changed)


def test_a_key_is_used_for_its_own_algorithm_only() -> None:
    only = read_keys(jwks(public_jwk(RSA, alg="PS256")))
    assert verify(token(RSA, "RS256"), only, ISSUER, ()) is None
    curve = private("ES384")
    signed = jwt.encode({"sub": "ada"}, KEY, "ES256", headers={"kid": "k1"})
    # RFC 7518 section 3.4: ES256 is P-256
    assert verify(signed, read_keys(jwks(public_jwk(curve))), ISSUER, ()) is None


@pytest.mark.parametrize("kid", ["other", "../k1", "k1\x00", "x" * 256])
def test_a_key_that_is_not_there_is_unknown(kid: str) -> None:
    assert verify(token(KEY, headers={"kid": kid}), KEYS, ISSUER, ()) is None


@pytest.mark.parametrize("kid", ["x" * 257, 1, ["k1"], {"k1": 1}])
def test_a_key_that_is_named_in_no_way_is_refused_and_has_no_keys_fetched(kid: Any) -> None:
    body = part({"iss": ISSUER, "sub": "ada", "exp": NOW + 9_999})
    with pytest.raises(BadToken, match=r"malformed key id|is not a JWT"):
        principal(f"{part({'alg': 'ES256', 'kid': kid})}.{body}.{part(b's')}")


def test_a_token_without_a_key_id_is_of_the_only_key() -> None:
    nameless = jwt.encode({"iss": ISSUER, "sub": "ada", "client_id": "app", "exp": NOW + 9_999}, KEY, "ES256")
    assert principal(nameless, read_keys(jwks(public_jwk(KEY, None)))) == of_claims(ISSUER, "ada", "app")
    two = read_keys(jwks(public_jwk(KEY), public_jwk(private("ES256"), "k2")))
    assert verify(nameless, two, ISSUER, ()) is None


@pytest.mark.parametrize("crit", [["b64"], ["new"], [], "b64", None])
@pytest.mark.parametrize("encoded", [False, True])
def test_what_must_be_understood_and_is_not_is_refused(crit: Any, *, encoded: bool) -> None:
    signed = f"{part({'alg': 'ES256', 'kid': 'k1', 'crit': crit, 'b64': encoded})}."
    body = part({"iss": ISSUER, "sub": "ada", "exp": NOW + 9_999})
    with pytest.raises(BadToken):
        principal(f"{signed}{body}.{part(b's' * 64)}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "a.b",
        "a.b.c",
        "a.b.c.d",
        "." * 16_000,
        "x" * 20_000,
        f"{part(b'[' * 9_000)}.e30.",
        "ä.ö.ü",
        "\udce4.a.b",
    ],
)
def test_garbage_is_refused(text: str) -> None:
    with pytest.raises(BadToken):
        principal(text)


def test_of_the_keys_only_those_that_can_verify_are_read() -> None:
    secret = {"kty": "oct", "k": "c2VjcmV0", "kid": "k1"}
    small = rsa.generate_private_key(65537, 1024)
    leaked = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(KEY))
    off_curve = {**public_jwk(KEY), "x": part(b"\x01" * 32)}
    useless = [
        secret,
        public_jwk(small),
        leaked,
        off_curve,
        public_jwk(KEY, use="enc"),
        {**public_jwk(KEY), "kid": 5},
        {"kty": "EC"},
        {"kty": ["EC"]},
        {"kty": "new"},
        "text",
        None,
    ]
    good = public_jwk(ec.generate_private_key(ec.SECP256R1()), "good")
    assert [key.id for key in read_keys(json.dumps({"keys": [*useless, good]}))] == ["good"]
    with pytest.raises(ValueError, match="has no public key"):
        read_keys(json.dumps({"keys": useless}))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"keys": {}}', "[" * 100_000, "\xff"])
def test_what_is_no_jwks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a JWKS"):
        read_keys(text)


def test_nothing_of_a_token_is_in_an_error() -> None:
    for text in (token(KEY, sub="s3cret", exp=1), token(private("ES256"), sub="s3cret"), "s3cret.s3cret.s3cret"):
        with pytest.raises(BadToken) as caught:
            principal(text)
        assert "s3cret" not in str(caught.value)
        assert '"' not in str(caught.value), "it stands in WWW-Authenticate"
