"""The how-to's commands and code, run on a record."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path

import httpx2
import pytest
from typer.testing import CliRunner

from tests.cli.conftest import (
    Record,
    record,  # noqa: F401
)
from tests.processes import Command
from tokentape._session.arrow import write_parquet
from tokentape.cli import app
from tokentape.store import SqliteStore
from tokentape.types import Provenance

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "view-tokens.md"
NAME = "tests/docs/test_view_tokens.py"


def block(name: str) -> str:
    pattern = rf"<!-- executed by {NAME}: {name} -->\n```\w+\n(.*?)```"
    (code,) = re.findall(pattern, PAGE.read_text("utf-8"), re.DOTALL)
    return str(code)


@pytest.fixture(autouse=True)
def _beside_a_record(record: Record, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """A directory in which the page's paths are there; the session's name is `s`."""
    directory = record([(Provenance.USER, "hello"), (Provenance.SAMPLED, "hi<|im_end|>")])
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "serve").symlink_to(directory)
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "model").symlink_to(model_dir)
    with SqliteStore.open(directory, read_only=True) as store:
        write_parquet(store.load_session("s").trajectories(), tmp_path / "trajectories.parquet")
    monkeypatch.chdir(tmp_path)


def arguments(name: str, n: int = 0) -> list[str]:
    """The arguments of the n-th command of a block."""
    prompt, program, *rest = shlex.split(block(name).splitlines()[n])
    assert (prompt, program) == ("$", "tokentape")
    return ["s" if argument == "SESSION" else argument for argument in rest]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["store", "file"])
def test_the_commands_show_the_page(name: str) -> None:
    with Command([*arguments(name), "--no-browser"]) as process:
        try:
            url = process.stdout.readline().strip()
            assert httpx2.get(f"{url}/api/about").json()["text"] is True
            assert httpx2.get(f"{url}/api/sessions").json()["total"] == 1
            process.send_signal(signal.SIGINT)
            assert process.wait() == 0
        finally:
            process.kill()


def test_the_terminal_shows_the_lanes() -> None:
    done = CliRunner().invoke(app, arguments("terminal"))
    assert done.exit_code == 0
    assert "loss | |" in done.stdout


def test_the_notebook_shows_text() -> None:
    *lines, last = block("notebook").strip().splitlines()
    scope: dict[str, object] = {}
    exec("\n".join(lines), scope)
    shown = eval(last, scope)._repr_html_()
    assert "hello" in re.sub("<style>.*</style>|<[^>]*>", "", shown, flags=re.DOTALL)


@pytest.mark.parametrize(("n", "name"), [(0, "run.html"), (1, "session.html")])
def test_files_are_written(n: int, name: str) -> None:
    assert CliRunner().invoke(app, arguments("export", n)).exit_code == 0
    assert Path(name).stat().st_size > 10_000


@pytest.mark.parametrize("name", ["viewer.png", "run.png", "compare.png"])
def test_the_pictures_are_small(name: str) -> None:
    assert (PAGE.parents[1] / "img" / name).stat().st_size < 200_000
