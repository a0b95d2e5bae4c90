"""Heads of requests that came before: the same bytes mean the same, so they are not parsed again."""

from collections.abc import Callable, Sequence
from typing import Final

from gateway.http.server.request import ReceivedHead
from gateway.runtime.newest import Newest

HEAD_END: Final = b"\r\n\r\n"
_KNOWN: Final = 512
"""How many heads are remembered, of all clients of a listener."""
_KNOWN_BYTES: Final = 4096
"""Longer heads are not remembered."""


class KnownHeads:
    """The heads that one listener remembers, by their bytes."""

    def __init__(self) -> None:
        self._heads: Newest[bytes, ReceivedHead] = Newest(_KNOWN)
        self._seen: set[int] = set()
        """The hashes of heads that came once."""
        self.find: Callable[[bytes], ReceivedHead | None] = self._heads.get
        """Finds a head by its bytes, without the empty line at its end."""

    def forget(self) -> None:
        """Forget all heads, because they have credentials; those that still come are learnt when they come again."""
        for head in self._heads.values():
            head.forget()
        self._heads.clear()

    def learn(self, data: bytes, message: ReceivedHead, fields: Sequence[tuple[bytes, bytes]]) -> None:
        """Remember the head of a POST that the parser accepted, if the connection stays open after it."""
        if len(data) > _KNOWN_BYTES or message.method != "POST" or not message.keep_alive:
            return
        if not message.length or message.target[0] != "/" or "Origin" in message.headers:
            return  # the reply to a page is not the usual one
        if (digest := hash(data)) not in self._seen:  # some clients send each head only once
            if len(self._seen) >= 8 * _KNOWN:
                self._seen.clear()
            self._seen.add(digest)
            return
        head = data.removesuffix(HEAD_END)
        line, *lines = head.split(b"\r\n")
        read = [(name, value.strip(b" \t")) for name, _, value in (line.partition(b":") for line in lines)]
        usual_line = b"POST %b HTTP/1.1" % message.target.encode("utf-8", "surrogateescape")
        if "Upgrade" in message.headers or line != usual_line or read != list(fields):
            return  # it was read with some leniency
        message.learn()
        if (oldest := self._heads.keep(head, message)) is not None:
            oldest.forget()
