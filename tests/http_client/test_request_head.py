"""The bytes of a request: what is sent, in place of what, and that a value never becomes anything else."""

import pytest
from yarl import URL

from gateway.http_client.request_head import HeaderLines, RequestHead

URL_ = URL("http://host.example:81/mcp?a=b")
DEFAULTS = b"Host: host.example:81\r\nAccept: */*\r\nAccept-Encoding: identity\r\nUser-Agent: mrtr-gateway\r\n"


def lines(encoded: bytes) -> list[bytes]:
    head, end, rest = encoded.partition(b"\r\n\r\n")
    assert (end, rest) == (b"\r\n\r\n", b"")
    return head.split(b"\r\n")


def test_a_request_without_headers_of_its_own_has_the_defaults() -> None:
    assert RequestHead("GET", URL_).encoded({}, 0) == b"GET /mcp?a=b HTTP/1.1\r\n" + DEFAULTS + b"\r\n"


@pytest.mark.parametrize(
    ("method", "body", "last"),
    [
        ("POST", 7, b"Content-Length: 7"),
        ("POST", 0, b"Content-Length: 0"),
        ("DELETE", 0, b"Content-Length: 0"),
        ("GET", 0, b"User-Agent: mrtr-gateway"),
        ("GET", 7, b"Content-Length: 7"),
        ("HEAD", 0, b"User-Agent: mrtr-gateway"),
        ("OPTIONS", 0, b"User-Agent: mrtr-gateway"),
    ],
)
def test_a_length_is_sent_wherever_a_body_is_expected(method: str, body: int, last: bytes) -> None:
    head = RequestHead(method, URL_)
    assert lines(head.encoded({}, body))[-1] == last


def test_headers_of_a_request_replace_defaults_in_any_case() -> None:
    own = {"USER-AGENT": "client/1", "accept-encoding": "gzip", "X": "1"}
    assert lines(RequestHead("GET", URL_).encoded(own, 0)) == [
        b"GET /mcp?a=b HTTP/1.1",
        b"Host: host.example:81",
        b"Accept: */*",
        b"USER-AGENT: client/1",
        b"accept-encoding: gzip",
        b"X: 1",
    ]


@pytest.mark.parametrize(
    "pairs", [[], [("X", "1")], [("X", "1"), ("X", "2")], [("ACCEPT", "a"), ("user-agent", "b"), ("X", "1")]]
)
def test_lines_that_were_made_before_give_the_same_head(pairs: list[tuple[str, str]]) -> None:
    multidict = pytest.importorskip("multidict")
    head = RequestHead("POST", URL("http://user:pass@host.example/mcp"))
    for size in (0, 7):
        assert head.encoded(HeaderLines.of(pairs), size) == head.encoded(multidict.CIMultiDict(pairs), size)


@pytest.mark.parametrize("pair", [("X", "a\r\nY: b"), ("X: a\r\nY", "b"), ("Content-Length", "1")])
def test_lines_are_made_of_valid_headers_only(pair: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="header"):
        _ = HeaderLines.of([pair])


def test_a_repeated_header_is_sent_as_often() -> None:
    multidict = pytest.importorskip("multidict")
    own = multidict.CIMultiDict([("Via", "a"), ("X", "1"), ("Via", "b")])
    assert lines(RequestHead("GET", URL_).encoded(own, 0))[-3:] == [b"Via: a", b"X: 1", b"Via: b"]


@pytest.mark.parametrize("bad", [*(chr(code) for code in range(32) if code != 9), "\x7f", "\r\n", "\r\nX: y", "\n "])
def test_a_control_character_in_a_value_raises_and_is_not_quoted(bad: str) -> None:
    for value in (f"secret{bad}", f"{bad}secret", f"sec{bad}ret"):
        with pytest.raises(ValueError, match="control character") as caught:
            RequestHead("GET", URL_).encoded({"A": value}, 0)
        assert "sec" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a\r\nb", "é", "a\x00", "a: b\r\nc", "(x)", "a\t"])
def test_a_name_that_is_not_a_token_raises(name: str) -> None:
    with pytest.raises(ValueError, match="not a token"):
        RequestHead("GET", URL_).encoded({name: "x"}, 0)


@pytest.mark.parametrize(
    "name", ["Content-Length", "transfer-encoding", "Connection", "Upgrade", "Expect", "TE", "Trailer"]
)
def test_a_header_that_delimits_messages_raises(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name.lower()} is written by the HTTP client"):
        RequestHead("POST", URL_).encoded({name: "1"}, 1)


def test_values_keep_tabs_other_alphabets_and_bytes_that_are_not_utf_8() -> None:
    own = {"A": "a\tb", "B": "é", "C": b"\xff".decode("utf-8", "surrogateescape"), "D": ""}
    assert lines(RequestHead("GET", URL_).encoded(own, 0))[-4:] == [b"A: a\tb", b"B: \xc3\xa9", b"C: \xff", b"D: "]


def test_a_surrogate_that_stands_for_no_byte_raises() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        RequestHead("GET", URL_).encoded({"A": "\ud800"}, 0)


@pytest.mark.parametrize(
    ("url", "target", "host"),
    [
        ("http://h", "/", "h"),
        ("http://h:80/", "/", "h"),
        ("https://h:443/a", "/a", "h"),
        ("http://[::1]:8080/a", "/a", "[::1]:8080"),
        ("http://h/a b?c d#e", "/a%20b?c+d", "h"),
        ("http://h/é", "/%C3%A9", "h"),
        ("http://bücher.example/", "/", "xn--bcher-kva.example"),
    ],
)
def test_the_target_and_the_host_are_those_of_the_url(url: str, target: str, host: str) -> None:
    sent = lines(RequestHead("GET", URL(url)).encoded({}, 0))
    assert sent[:2] == [f"GET {target} HTTP/1.1".encode(), f"Host: {host}".encode()]


def test_the_user_in_the_url_is_sent_unless_the_request_has_a_credential() -> None:
    head = RequestHead("GET", URL("http://ada:p%20w@h/"))
    assert b"Authorization: Basic YWRhOnAgdw==" in lines(head.encoded({}, 0))
    sent = lines(head.encoded({"authorization": "Bearer t"}, 0))
    assert [line for line in sent if line.lower().startswith(b"authorization")] == [b"authorization: Bearer t"]


@pytest.mark.parametrize("method", ["", "get", "GET /x", "GET\r\n"])
def test_a_method_that_cannot_be_sent_raises(method: str) -> None:
    with pytest.raises(ValueError, match="method or the path"):
        RequestHead(method, URL_)


def test_a_path_that_cannot_be_sent_raises() -> None:
    with pytest.raises(ValueError, match="method or the path"):
        RequestHead("GET", URL("http://h/a b", encoded=True))
