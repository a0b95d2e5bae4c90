"""One table of stories, told at every face and before every link.

A row says what the server does, what the client does and what it sees. Where that depends on the way that the call
takes (docs/model.md), the row has a dialogue for each way, or for a single pair of a face and a link.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests.stories import faces
from tests.stories.faces import Client, Diary
from tests.stories.links import LINKS, Ledger
from tests.stories.memory_face import modern_memory
from tests.support.workbench import eventually

FACES: Final = faces.FACES | {"modern memory": modern_memory}
ADA: Final = {"action": "accept", "content": {"name": "Ada"}}
ULM: Final = {"action": "accept", "content": {"name": "Ulm"}}
DECLINES: Final = {"action": "decline"}
WAYS: Final = {
    (True, True): "modern",
    (True, False): "bridge",
    (False, True): "mirror",
    (False, False): "legacy",
}
"""By whether the client and the server are modern."""
PASSED: Final = ("modern HTTP > modern HTTP", "streamable HTTP > streamable HTTP", "HTTP+SSE > HTTP+SSE")
"""Pairs whose bytes pass through unread."""


class Story(NamedTuple):
    """One row; dialogues are lines with `; ` between them."""

    server: str
    client: Client
    sees: str | Mapping[str, str]
    """All that the client sees. A mapping has it by pair (`face > link`), face or way, and under `""` for others."""
    rounds: int = 1
    """How often the tool of a modern server begins; that of a legacy server begins once."""
    cancelled: str = ""
    """The ways on which the server hears that its call was cancelled."""
    sections: Mapping[str, Any] = {}
    """Of the configuration."""


STORIES: Final[dict[str, Story]] = {
    "a plain result": Story("text", Client(), "done"),
    "a failed tool": Story("fail", Client(), "failed"),
    "an error": Story("error", Client(), {"bridge": "error -32603", "": "error -32050"}),
    "progress and logs": Story(
        "progress 1; log hi; progress 2; text", Client(), "progress 1; log hi; progress 2; done"
    ),
    "a question": Story("ask name; text", Client({"name": ADA}), "asked name; done name: Ada", rounds=2),
    "progress on both sides of a question": Story(
        "progress 1; ask name; progress 2; log hi; text",
        Client({"name": ADA}),
        "progress 1; asked name; progress 2; log hi; done name: Ada",
        rounds=2,
    ),
    "two questions one after the other": Story(
        "ask name; ask town; text",
        Client({"name": ADA, "town": ULM}),
        "asked name; asked town; done name: Ada, town: Ulm",
        rounds=3,
    ),
    "two questions at once": Story(
        "ask name town; text",
        Client({"name": ADA, "town": ULM}),
        "asked name; asked town; done name: Ada, town: Ulm",
        rounds=2,
    ),
    "a question that the user declines": Story(
        "ask name; text", Client({"name": DECLINES}), "asked name; done name: decline", rounds=2
    ),
    "a question that the client refuses": Story(
        "ask name; text",
        Client({"name": None}),
        {
            "legacy": "asked name; done name: refused",
            "mirror": "asked name; failed The client refused elicitation/create: User rejected",
        },
    ),
    "a question that the client did not declare": Story(
        "ask name; text",
        Client({"name": ADA}, capabilities={}),
        {
            "bridge": "error -32021",
            "mirror": "failed The server asked elicitation/create, and this client did not declare the capability "
            "elicitation",
        },
        cancelled="bridge",
    ),
    "a call that the client cancels": Story(
        "progress 1; hang",
        Client(leaves_at="progress 1"),
        "progress 1",
        cancelled="modern bridge mirror legacy",
    ),
    "a call that the client cancels at its question": Story(
        "ask name; text", Client({"name": ADA}, leaves_at="asked name"), "asked name", cancelled="legacy"
    ),
    "a server that dies": Story(
        "progress 1; die",
        Client(),
        {
            **dict.fromkeys(PASSED, "progress 1; cut off"),
            "": "progress 1; error call_lost",
        },
    ),
    "a server that dies after its question was answered": Story(
        "ask name; die",
        Client({"name": ADA}),
        {
            **dict.fromkeys(PASSED[1:], "asked name; cut off"),
            "": "asked name; error call_lost",
        },
        rounds=2,
    ),
    "a server that dies at once": Story(
        "die",
        Client(),
        {
            "HTTP+SSE > HTTP+SSE": "cut off",
            "": "error call_lost",
        },
    ),
    "a call that is too large": Story(
        "text",
        Client(pads=90_000),
        {
            "HTTP+SSE": "refused by 413",
            "stdio": "error -32700",
            "modern stdio": "error -32700",
            "": "error -32600",
        },
        rounds=0,
        sections={"limits": {"body_bytes": 65_536}},
    ),
    "a call for which there is no room": Story(
        "text",
        Client(pads=9_000),
        {"HTTP+SSE > HTTP+SSE": "refused by 429", "": "error busy"},
        rounds=0,
        sections={"limits": {"calls_bytes_per_principal": 8_192}},
    ),
    "a large result": Story("large 90000", Client(), "done " + "x" * 90_000),
}


def way_of(face: str, link: str) -> str:
    return WAYS[face.startswith("modern"), link.startswith("modern")]


CELLS: Final = [
    pytest.param(
        *(face, link, name),
        id=f"{name}, {face} > {link}",
        marks=[pytest.mark.processes] if "stdio" in link else [],
    )
    for name, story in STORIES.items()
    for face in FACES
    for link in LINKS
    if isinstance(story.sees, str) or story.sees.keys() & {"", way_of(face, link), f"{face} > {link}"}
]


@pytest.mark.parametrize(("face", "link", "name"), CELLS)
async def test_a_story_is_the_same_at_every_face_and_before_every_link(
    face: str, link: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story, ledger, way = STORIES[name], Ledger(tmp_path / "ledger"), way_of(face, link)
    is_cancelled = way in story.cancelled.split()

    async def server_heard() -> None:
        # A host that closes its end may have its calls cancelled once more.
        await eventually(lambda: bool(ledger.count("cancelled")) == is_cancelled, "the server has heard of it")

    diary = Diary(story.client, server_heard)
    async with LINKS[link](ledger) as upstream:
        sections = {**story.sections, "route": {"upstream": upstream}}
        async with FACES[face](sections, monkeypatch) as play:
            await play(story.client, story.server.split("; "), diary)
            if is_cancelled:
                await server_heard()
    sees = story.sees
    if not isinstance(sees, str):
        sees = next(sees[key] for key in (f"{face} > {link}", face, way, "") if key in sees)
    assert "; ".join(diary.lines) == sees
    assert ledger.count("run") == (story.rounds if link.startswith("modern") else min(story.rounds, 1))
