"""The workflow files, which cannot run here: are they well-formed and safe, and do they run what a developer runs?"""

import sys
from pathlib import Path

import pytest
import yaml

from tests.parts.launch import REPOSITORY
from tests.support.programs import verdict

GITHUB = REPOSITORY / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))


def lint(program: str, *arguments: str | Path) -> tuple[int, str]:
    return verdict(Path(sys.executable).parent / program, *arguments)


def commands(workflow: Path) -> list[str]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize(
    ("schema", "files"),
    [("vendor.github-workflows", WORKFLOWS), ("vendor.dependabot", [GITHUB / "dependabot.yml"])],
    ids=["workflows", "update bot"],
)
def test_the_files_are_what_github_reads(schema: str, files: list[Path]) -> None:
    assert files
    code, said = lint("check-jsonschema", "--builtin-schema", schema, *files)
    assert code == 0, said


def test_zizmor_finds_nothing() -> None:
    code, said = lint("zizmor", "--offline", "--persona", "auditor", GITHUB)
    assert code == 0, said


def test_zizmor_finds_an_action_that_is_not_pinned(tmp_path: Path) -> None:
    folder = tmp_path / ".github" / "workflows"
    folder.mkdir(parents=True)
    text = (GITHUB / "workflows" / "ci.yml").read_text()
    pinned = next(word for word in text.split() if word.startswith("actions/checkout@"))
    (folder / "ci.yml").write_text(text.replace(pinned, "actions/checkout@v7"))
    code, said = lint("zizmor", "--offline", tmp_path)
    assert code != 0
    assert "unpinned-uses" in said


def test_actionlint_finds_nothing() -> None:
    code, said = lint("actionlint", *WORKFLOWS)
    assert code == 0, said


def test_actionlint_finds_a_machine_that_does_not_exist(tmp_path: Path) -> None:
    workflow = tmp_path / "ci.yml"
    workflow.write_text((GITHUB / "workflows" / "ci.yml").read_text().replace("ubuntu-24.04", "ubuntu-1.04"))
    code, said = lint("actionlint", workflow)
    assert code != 0
    assert "ubuntu-1.04" in said


def test_the_workflows_run_what_a_developer_runs() -> None:
    said = {workflow.stem: commands(workflow) for workflow in WORKFLOWS}
    assert any(".ci/run" in command for command in said["ci"])
    assert "make release" in said["release"]
