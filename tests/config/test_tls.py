"""TLS contexts, and the files that cannot be used for them."""

import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gateway.config import ConfigError, contexts, parse, validity
from tests.support.authority import DAY, Authority
from tests.support.configurations import missing
from tests.support.workbench import configuration


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def problems(tmp_path: Path, **sections: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(configuration("https://127.0.0.1:1/mcp", **sections), str(tmp_path / "gateway.yaml"), {})
    return caught.value.problems


def test_every_file_that_cannot_be_used_is_told_with_its_reason(tmp_path: Path, ca: Authority) -> None:
    (tmp_path / "text.pem").write_text("nothing")
    ca.sign("locked", password=b"pass")
    ca.sign("one")
    ca.sign("two")

    def of(**tls: str) -> tuple[str, ...]:
        return problems(tmp_path, tls=tls)

    assert of(cert_file="no.pem") == (f"tls.cert_file: {missing(tmp_path / 'no.pem')}",)
    assert of(cert_file="text.pem") == ("tls.cert_file: contains no readable certificate; give it as PEM",)
    assert of(cert_file="ca.pem") == (
        "tls.cert_file: contains no readable private key; add it there as PEM, or set key_file",
    )
    assert of(cert_file="locked.pem") == ("tls.cert_file: is encrypted; write the key without a password",)
    assert of(cert_file="one.pem", key_file="two.pem") == (
        "tls.key_file: is not the key of the certificate in cert_file; give a matching pair",
    )
    assert of(cert_file="one.pem", client_ca_file="text.pem") == (
        "tls.client_ca_file: contains no readable certificate; give certificates as PEM",
    )
    assert of(cert_file="text.pem", key_file="no.pem", client_ca_file="text.pem") == (
        "tls.cert_file: contains no readable certificate; give it as PEM",
        f"tls.key_file: {missing(tmp_path / 'no.pem')}",
        "tls.client_ca_file: contains no readable certificate; give certificates as PEM",
    )
    assert of(key_file="one.pem") == (
        "tls.key_file: is set without tls.cert_file; give the certificate too, or remove it",
    )
    upstream = {"url": "https://127.0.0.1:1/mcp", "tls": {"ca_file": "text.pem", "cert_file": "one.pem"}}
    assert problems(tmp_path, route={"upstream": upstream}) == (
        "routes[0].upstream.tls.ca_file: contains no readable certificate; give certificates as PEM",
    )


def test_without_files_the_listener_speaks_plain_http_and_upstreams_have_the_default_context() -> None:
    plain = parse(configuration("https://127.0.0.1:1/mcp"), "test", {})
    assert contexts(plain) == (None, {"/mcp": None}, None, ())


def test_a_listener_with_client_authorities_asks_for_certificates(ca: Authority) -> None:
    certificate = str(ca.sign("gateway"))
    for client_ca, mode in ((None, ssl.CERT_NONE), (str(ca.file), ssl.CERT_REQUIRED)):
        config = parse(
            configuration("http://a/", tls={"cert_file": certificate, "client_ca_file": client_ca}), "test", {}
        )
        listener = contexts(config).listener
        assert listener is not None
        assert listener.verify_mode is mode


def test_an_upstream_has_its_own_authority_and_certificate_or_accepts_any(ca: Authority) -> None:
    def of(**tls: Any) -> ssl.SSLContext:
        upstream = {"url": "https://127.0.0.1:1/mcp", "tls": tls}
        context = contexts(parse(configuration("", route={"upstream": upstream}), "test", {})).upstreams["/mcp"]
        assert context is not None
        return context

    own = of(ca_file=str(ca.file))
    assert [each["subject"] for each in own.get_ca_certs()] == [((("commonName", "test ca"),),)]
    assert (own.verify_mode, own.check_hostname) == (ssl.CERT_REQUIRED, True)
    shown = of(cert_file=str(ca.sign("client")))
    assert len(shown.get_ca_certs()) != 1, "it trusts the authorities of the system"
    trusting = of(verify=False)
    assert (trusting.verify_mode, trusting.check_hostname) == (ssl.CERT_NONE, False)


def test_the_authority_of_the_keys_must_be_readable(tmp_path: Path) -> None:
    file = tmp_path / "none.pem"
    principal = {"source": "jwt", "issuer": "i", "jwks_url": "https://a/j", "jwks_ca_file": str(file)}
    with pytest.raises(ConfigError) as caught:
        parse(configuration("http://a/", principal=principal), "test", {})
    assert caught.value.problems == (f"principal.jwks_ca_file: {missing(file)}",)


def test_the_validity_of_each_certificate_is_known_by_its_key(tmp_path: Path, ca: Authority) -> None:
    listener, client = ca.sign("listener", days=5), ca.sign("client", days=7)
    upstream = {"url": "https://127.0.0.1:1/mcp", "tls": {"cert_file": str(client), "ca_file": str(client)}}
    config = parse(
        configuration("https://127.0.0.1:1/mcp", tls={"cert_file": str(listener)}, route={"upstream": upstream}),
        "test",
        {},
    )
    found = validity(config)
    keys = ["routes[/mcp].upstream.tls.ca_file", "routes[/mcp].upstream.tls.cert_file"]
    assert list(found) == ["tls.cert_file", *keys]
    now = datetime.now(UTC)
    assert [[round((moment - now) / DAY) for moment in moments] for moments in found.values()] == [
        [-20, 5],
        [-20, 7],
        [-20, 7],
    ]
    assert validity(parse(configuration("http://127.0.0.1:1/mcp"), "test", {})) == {}
    listener.unlink()
    assert list(validity(config)) == keys
