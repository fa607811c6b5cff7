"""The commands and code of docs/drift.md and docs/how-to/compare-ids.md, run on what an agent recorded."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import tokentape
from tests.test_client import talk
from tokentape.audit._tokendiff.kinds import ARTIFACTS, KINDS
from tokentape.chat._renderer import Renderer
from tokentape.cli import app
from tokentape.store._served_model import ServedModel, write_served_model

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {name: (DOCS / name).read_text("utf-8") for name in ("drift.md", "how-to/compare-ids.md")}
BLOCKS = dict(
    block
    for page in PAGES.values()
    for block in re.findall(r"<!-- executed by [\w/.]+: (\w+) -->\n```\w+\n(.*?)```", page, re.DOTALL)
)


@pytest.fixture
def shell(
    gateway_url: str, model_dir: Path, renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Result]:
    """Runs a block in a folder with the files that it names; the record is of a gateway that is running."""
    monkeypatch.chdir(tmp_path)
    with tokentape.Client(gateway_url) as client:
        session = client.session("s")
        talk(session.base_url)
    write_served_model("data", ServedModel(str(model_dir), renderer.tokenizer.sha256, renderer.fingerprint))
    Path("runs").mkdir()
    Path("runs/serve").symlink_to(tmp_path / "data")
    assert CliRunner().invoke(app, ["export", "data", "-o", "batch.jsonl"]).exit_code == 0
    Path("golden.jsonl").write_text(Path("batch.jsonl").read_text())
    ids = json.loads(Path("batch.jsonl").read_text())["token_ids"]
    Path("rollouts.jsonl").write_text(json.dumps({"output_ids": ids, "step": 1}) + "\n")

    def run(name: str) -> Result:
        command = BLOCKS[name].removeprefix("$ tokentape ").replace("path/to/model", str(model_dir))
        return CliRunner().invoke(app, shlex.split(command))

    return run


def test_commands_do_what_the_pages_state(shell: Callable[[str], Result]) -> None:
    for name in ("record", "foreign", "compare", "ci"):
        done = shell(name)
        assert done.exit_code == 0, (name, done.output)
    assert Path("drift.html").is_file()


def test_the_code_runs(
    shell: Callable[[str], Result], model_dir: Path, renderer: Renderer, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(BLOCKS["python"].replace("path/to/model", str(model_dir)), {})
    assert "0.0% of the completions" in capsys.readouterr().out
    encode = renderer.tokenizer.encode_plain
    names = {
        "expected_ids": encode("They cost 12."),
        "batch_ids": encode("They") + encode(" co") + encode("st") + encode(" 12."),
    }
    exec(BLOCKS["pytest"].replace("path/to/model", str(model_dir)), names)
    with pytest.raises(AssertionError, match="1 difference, 1 of them errors \\(ids 1\\)"):
        names["test_the_batch_holds_what_was_sampled"]()  # type: ignore[operator]


def test_every_artifact_and_kind_is_explained() -> None:
    explained = set(re.findall(r"`([\w-]+)`", PAGES["drift.md"]))
    assert ARTIFACTS.keys() <= explained
    assert KINDS.keys() <= set(re.findall(r"`(\w+)`", PAGES["how-to/compare-ids.md"]))
