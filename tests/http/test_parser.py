"""The HTTP parser of aiohttp: the C parser, or a warning at start."""

import pytest
from aiohttp import http_parser

from gateway.http.parser import parser_caution
from tests.support.gateway_process import gateway


def test_the_parser_under_test_is_the_c_parser() -> None:
    assert http_parser.HttpRequestParser is not http_parser.HttpRequestParserPy
    assert parser_caution() is None
    assert "without its C parser" in (parser_caution(http_parser.HttpRequestParserPy) or "")


@pytest.mark.processes
@pytest.mark.parametrize(("value", "warnings"), [("1", 1), ("", 0)])
async def test_a_start_without_the_c_parser_warns(monkeypatch: pytest.MonkeyPatch, value: str, warnings: int) -> None:
    monkeypatch.setenv("AIOHTTP_NO_EXTENSIONS", value)
    async with gateway("http://127.0.0.1:9/mcp") as started:
        said = [line for line in started.log("config.caution") if "AIOHTTP_NO_EXTENSIONS" in line["note"]]
        assert len(said) == warnings
