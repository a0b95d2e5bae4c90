"""The published JSON Schema."""

import json
import subprocess
import sys
from pathlib import Path

from gateway.config.schema import json_schema

ROOT = Path(__file__).parents[2]


def test_the_published_schema_is_the_generated_one() -> None:
    run = [sys.executable, "-W", "error", "-m", "gateway", "schema"]
    printed = subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert (ROOT / "config/mrtr-gateway.schema.json").read_text() == printed
    assert json.loads(printed) == json.loads(json.dumps(json_schema()))


def test_the_schema_describes_every_key_and_allows_no_other() -> None:
    for section in json_schema()["$defs"].values():
        assert section["additionalProperties"] is False
        assert all(item.get("description") for item in section["properties"].values()), section["title"]
