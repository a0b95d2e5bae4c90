"""The last thing that is done to a report: nothing leaves that could misuse a terminal, or that was to be hidden."""

import pytest
from msgspec import structs

from gateway.protocol.errors import clean
from gateway.tools.probe.report.findings import Check, ProbedServer, Server
from gateway.tools.probe.report.redaction import Redactor

EVIL = "a\x1b[31m\r\nb\x00\u202ec\u2028d"


def test_one_line_is_left_of_any_text() -> None:
    assert clean(EVIL) == "a?[31m  b??c d"
    assert clean("x" * 2000) == "x" * 1000 + "…"


@pytest.mark.parametrize("field", ["found", "why", "fix"])
def test_every_text_of_a_check_is_treated(field: str) -> None:
    check = Check(name="n", state="ok", found="f")
    treated = Redactor(["secret"]).check(structs.replace(check, **{field: f"{EVIL} secret"}))
    assert getattr(treated, field) == f"{clean(EVIL)} <hidden>"


@pytest.mark.parametrize("field", ["name", "versions", "capabilities", "left_out_tools"])
def test_every_text_of_a_server_is_treated(field: str) -> None:
    given = f"{EVIL} secret"
    server = structs.replace(Server(), **{field: given if field == "name" else (given,)})
    treated = Redactor(["secret"]).upstream(ProbedServer(target="t", server=server)).server
    assert treated is not None
    shown = getattr(treated, field)
    assert (shown if field == "name" else shown[0]) == f"{clean(EVIL)} <hidden>"


def test_a_token_is_hidden_with_and_without_its_scheme_and_the_longest_first() -> None:
    hide = Redactor(["Bearer abcdef", "abcd", "xy"])
    assert hide.text("Bearer abcdef, abcdef, abcd, abc, xy") == "<hidden>, <hidden>, <hidden>, abc, xy"
