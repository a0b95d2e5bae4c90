"""Recognises replies whose head has the same form as an earlier one of the same server.

The heads of a server differ in values such as a date or a length. What else they say was understood before, by
llhttp. So a head takes one regular expression, in place of a callback for each of its parts, and a body of known
length takes nothing. A chunked body takes one for each chunk, as long as what arrives ends with a chunk.

Rule: a form fixes the status line, the names of the headers in their order, and the values of all headers that
delimit the message, describe the body, or decide about the connection. Whatever deviates is left to llhttp.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.http_client.reply_head import ReplyHead
from gateway.http_client.reply_parser import ChunkedRest, Rest, SizedRest, chunks

_CANONICAL: Final = re.compile(
    rb"HTTP/1\.1 ([2-9][0-9]{2}) ([ -~]*)\r\n((?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+: [ -~]*\r\n)*)\r\n"
)
_FIELD: Final = re.compile(rb"([^:]+): ([^\r]*)\r\n")
_FIXED: Final = frozenset(
    {
        b"connection",
        b"content-encoding",
        b"content-type",
        b"keep-alive",
        b"proxy-connection",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""The headers whose values belong to the form."""
_WITHOUT_BODY: Final = (204, 304)
_CHUNKS: Final = ChunkedRest("kept")
_MAX_HEAD_BYTES: Final = 8192
_MAX_FORMS: Final = 8
_MAX_LESSONS: Final = 32
"""It takes as long to learn a form as to parse a hundred replies, so a server with ever new forms is given up."""


@dataclass(slots=True, eq=False)
class Form:
    """What the heads of many replies have in common."""

    pattern: re.Pattern[bytes]
    """Has a group for each value."""
    status: int
    reason: bytes
    names: tuple[bytes, ...]
    content_type: str
    keep_alive_seconds: int | None
    length: int | None
    """The number of the group that has the length of the body; None if the body is chunked."""
    template: Any = None
    """How such a head goes on to a client, once one has."""


class FamiliarReply(ReplyHead, eq=False, kw_only=True):
    """The head of a reply of a known form; most of its values are never looked at."""

    content_type: str
    keep_alive_seconds: int | None
    """Fields, because a property takes as long as a call."""
    form: Form
    values: re.Match[bytes]
    """Has a group for the value of each header."""

    @property
    def fields(self) -> list[tuple[bytes, bytes]]:
        """See `ReplyHead`."""
        if self._fields is None:
            self._fields = list(zip(self.form.names, self.values.groups(), strict=True))
        return self._fields


@dataclass(slots=True, eq=False)
class FamiliarHeads:
    """The forms of one server, the one that came last first."""

    _forms: list[Form] = field(default_factory=list)
    _lessons: int = 0

    def reply(self, data: bytes) -> tuple[FamiliarReply, Sequence[bytes], Rest] | None:
        """Read the reply that begins with these bytes, if its form is known and nothing is behind its end."""
        forms = self._forms
        for form in forms:
            found = form.pattern.match(data)
            if found is not None:
                if form is not forms[0]:
                    forms.remove(form)
                    forms.insert(0, form)
                begin, missing, kind = found.end(), 0, form.content_type
                if form.length is not None:
                    parts: Sequence[bytes] = (data[begin:],) if begin < len(data) else ()
                    missing = int(found[form.length]) + begin - len(data)
                    rest: Rest = SizedRest(missing, kind, "kept") if missing else "kept"
                elif (chunked := chunks(data, begin)) is not None:
                    parts, rest = chunked[0], "kept" if chunked[1] else _CHUNKS
                else:
                    return None
                if begin > _MAX_HEAD_BYTES or missing < 0:
                    return None
                if rest != "kept":
                    # The head stays while the rest comes, and must not keep the part of the body that came with it.
                    found = form.pattern.match(data[:begin]) or found
                head = FamiliarReply(
                    form.status,
                    None,
                    form.reason,
                    content_type=kind,
                    keep_alive_seconds=form.keep_alive_seconds,
                    form=form,
                    values=found,
                )
                return head, parts, rest
        return None

    def learn(self, data: bytes) -> None:
        """Learn the form of a reply that begins so and leaves its connection open, if its end can be found here."""
        if self._lessons >= _MAX_LESSONS or (found := _CANONICAL.match(data, 0, _MAX_HEAD_BYTES)) is None:
            return
        status, reason = int(found[1]), found[2]
        head = ReplyHead(status, _FIELD.findall(found[3]), reason)
        lengths, codings = head.get_all(b"content-length"), head.get_all(b"transfer-encoding")
        if status in _WITHOUT_BODY or len(lengths) + len(codings) != 1:
            return
        if codings and codings[0].lower() != b"chunked":
            return
        self._lessons += 1
        names = tuple(name for name, _ in head.fields)
        lines = b"".join(b"%b: %b\r\n" % (re.escape(name), _value(name.lower(), value)) for name, value in head.fields)
        pattern = re.compile(b"HTTP/1\\.1 %d %b\r\n%b\r\n" % (status, re.escape(reason), lines))
        if any(pattern == known.pattern for known in self._forms):
            return
        length = None if codings else [name.lower() for name in names].index(b"content-length") + 1
        form = Form(pattern, status, reason, names, head.content_type, head.keep_alive_seconds, length)
        self._forms.insert(0, form)
        del self._forms[_MAX_FORMS:]


def _value(name: bytes, value: bytes) -> bytes:
    """The expression for the value of a header."""
    if name == b"content-length":
        return b"([0-9]{1,15})"
    return b"(%b)" % re.escape(value) if name in _FIXED else b"([ -~]*)"
