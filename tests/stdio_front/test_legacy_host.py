"""The link between a legacy host and the backend of its session."""

from unittest.mock import Mock

from gateway.protocol import jsonrpc
from gateway.stdio_front.legacy_host import LegacyHost


def test_an_answer_whose_id_is_escaped_in_another_way_reaches_the_host() -> None:
    host = Mock()
    legacy = LegacyHost(host, lambda _: Mock(), Mock())
    line = '{"jsonrpc":"2.0","id":"caf\u00e9","method":"tools/list"}'.encode()
    legacy.receive(line, jsonrpc.message(line))
    answer = b'{"jsonrpc":"2.0","id":"caf\\u00e9","result":{}}'
    legacy.send(answer, None)
    host.send.assert_called_once_with(answer)
    assert not legacy.is_busy
