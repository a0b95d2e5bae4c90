"""Builds TLS contexts, and reads the issuer's keys, from the files that the configuration names."""

import ssl
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from msgspec.structs import asdict

from gateway.config.model.config import Config, Tls
from gateway.config.model.route import UpstreamTls
from gateway.config.parsing.problems import ConfigError, Problem, unreadable
from gateway.identity.jwt_verification import Key, read_keys


class Contexts(NamedTuple):
    """What the files of one configuration come to."""

    listener: ssl.SSLContext | None
    """None for plain HTTP."""
    upstreams: dict[str, ssl.SSLContext | None]
    """By the route's path; None for the default: the system's authorities, without a client certificate."""
    issuer: ssl.SSLContext | None
    """For fetching the issuer's keys; None for the default."""
    issuer_keys: tuple[Key, ...]
    """Those of `principal.jwks_file`."""


def contexts(config: Config) -> Contexts:
    """Return all contexts of a configuration. Raises ConfigError with every file that cannot be used."""
    problems: list[Problem] = []
    keys: tuple[Key, ...] = ()
    listener = listener_context(config.tls, problems)
    # With this prefix, an error about `ca_file` names principal.jwks_ca_file.
    issuer = upstream_context(UpstreamTls(ca_file=config.principal.jwks_ca_file), "principal.jwks_", problems)
    if (jwks := config.principal.jwks_file) is not None:
        try:
            keys = read_keys(Path(jwks).read_bytes())
        except OSError as exc:
            problems.append(Problem("principal.jwks_file", unreadable(jwks, exc)))
        except ValueError as exc:
            problems.append(Problem("principal.jwks_file", f"{exc}; fetch it from the issuer again"))
    upstreams = {
        route.path: upstream_context(route.upstream.tls, f"routes[{place}].upstream.tls.", problems)
        for place, route in enumerate(config.routes)
    }
    if problems:
        raise ConfigError(problems)
    return Contexts(listener, upstreams, issuer, keys)


def listener_context(tls: Tls, problems: list[Problem]) -> ssl.SSLContext | None:
    """Return the listener's context; None for plain HTTP."""
    if tls.cert_file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    problems += _show(context, "tls.", tls.cert_file, tls.key_file)
    if tls.client_ca_file is not None:
        problems += _trust(context, "tls.client_ca_file", tls.client_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def upstream_context(tls: UpstreamTls, section: str, problems: list[Problem]) -> ssl.SSLContext | None:
    """Return the context for an upstream; None for the default. The problems get keys of this section."""
    if tls == UpstreamTls(server_name=tls.server_name):
        return None  # the name of the server is given with each connection
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if tls.ca_file is not None:
        problems += _trust(context, f"{section}ca_file", tls.ca_file)
    else:
        context.load_default_certs()
    if tls.cert_file is not None:
        problems += _show(context, section, tls.cert_file, tls.key_file)
    if not tls.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


Validity = dict[str, tuple[datetime, datetime]]
"""Since when and until when the certificates of each file can be used, by the path of its key."""


def validity(config: Config) -> Validity:
    """Return the validity of what the files have now; one that cannot be read is left out: `contexts` reports it."""
    found = {}
    for key, path in named_files(config):
        if key.endswith(("cert_file", "ca_file")):
            # An intermediate certificate may expire first. Of many authorities, some have always expired.
            begin, end = (min, max) if key.endswith("ca_file") else (max, min)
            with suppress(OSError, ValueError):
                chain = x509.load_pem_x509_certificates(Path(path).read_bytes())
                ends = end(each.not_valid_after_utc for each in chain)
                found[key] = begin(each.not_valid_before_utc for each in chain), ends
    return found


def named_files(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each file for TLS, or of the issuer's keys, by the path of its key."""
    sections = {"tls": asdict(config.tls), "principal": asdict(config.principal)}
    sections |= {f"routes[{route.path}].upstream.tls": asdict(route.upstream.tls) for route in config.routes}
    for name, section in sections.items():
        for key, path in section.items():
            if key.endswith("_file") and path is not None:
                yield f"{name}.{key}", path


def _trust(context: ssl.SSLContext, key: str, path: str, what: str = "certificates") -> list[Problem]:
    """Load authorities; return what is wrong with their file."""
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError:
        return [Problem(key, f"contains no readable certificate; give {what} as PEM")]
    except OSError as exc:
        return [Problem(key, unreadable(path, exc))]
    return []


def _show(context: ssl.SSLContext, section: str, cert_file: str, key_file: str | None) -> list[Problem]:
    """Load a certificate and its key; return what is wrong with each file, which OpenSSL does not tell apart."""
    found = _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), f"{section}cert_file", cert_file, "it")
    key_name = f"{section}{'cert_file' if key_file is None else 'key_file'}"
    if key_file is not None:
        try:
            _ = Path(key_file).read_bytes()
        except OSError as exc:
            found.append(Problem(key_name, unreadable(key_file, exc)))
    if found:
        return found

    def refuse() -> str:
        raise ValueError("is encrypted; write the key without a password")  # else OpenSSL would ask at the terminal

    try:
        context.load_cert_chain(cert_file, key_file, password=refuse)
    except ssl.SSLError as exc:
        if exc.reason == "KEY_VALUES_MISMATCH":
            text = "is not the key of the certificate in cert_file; give a matching pair"
        elif key_file is None:
            text = "contains no readable private key; add it there as PEM, or set key_file"
        else:
            text = "contains no readable private key; give it as PEM"
        found.append(Problem(key_name, text))
    except ValueError as exc:
        found.append(Problem(key_name, str(exc)))
    return found
