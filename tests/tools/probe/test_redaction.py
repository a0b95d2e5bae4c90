"""The last thing that is done to a report: nothing leaves that could misuse a terminal, or that was to be hidden."""

from gateway.protocol.errors import clean
from gateway.tools.probe.report.findings import Check, Server
from gateway.tools.probe.report.text import TextReport
from gateway.tools.probe.steps.context import Notes

EVIL = "a\x1b[31m\r\nb\x00\u202ec\u2028d"


def test_every_text_of_a_check_is_treated() -> None:
    notes = Notes(["secret"], TextReport(None))
    notes.warn("n", *[f"{EVIL} secret"] * 3)
    treated = f"{clean(EVIL)} <hidden>"
    assert notes.checks == [Check(name="n", state="warning", found=treated, why=treated, fix=treated)]


def test_every_text_of_a_server_is_treated() -> None:
    given, treated = f"{EVIL} secret", f"{clean(EVIL)} <hidden>"
    server = Server(name=given, versions=(given,), capabilities=(given,), left_out_tools=(given,))
    shown = (treated,)
    assert Notes(["secret"], TextReport(None)).safe_server(server) == Server(
        name=treated, versions=shown, capabilities=shown, left_out_tools=shown
    )


def test_a_token_is_hidden_with_and_without_its_scheme_and_the_longest_first() -> None:
    notes = Notes(["Bearer abcdef", "abcd", "xy"], TextReport(None))
    assert notes.safe("Bearer abcdef, abcdef, abcd, abc, xy") == "<hidden>, <hidden>, <hidden>, abc, xy"
