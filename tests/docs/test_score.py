"""The commands of docs/how-to/score.md."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import tokentape
from tests.docs.sample_output import assert_same_lines
from tests.engines.stand_in import StandIn
from tests.test_client import talk
from tokentape.chat._renderer import Renderer
from tokentape.cli import app
from tokentape.gateway._serve import running
from tokentape.store import SqliteStore
from tokentape.store._served_model import ServedModel, write_served_model

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "score.md"


class Halves:
    """A teacher to which every token is as likely as a coin's side."""

    def logprobs(self, ids: list[int]) -> list[float]:
        return [-0.5] * (len(ids) - 1)


def test_the_page_scores_by_a_teacher_and_by_the_sampler(
    gateway_url: str,
    store: SqliteStore,
    model_dir: Path,
    renderer: Renderer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    found = re.findall(r"<!-- executed by [\w/.]+: (\w+) -->\n```\w+\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    blocks = dict(found)
    with tokentape.Client(gateway_url) as client:
        talk(client.session("s").base_url)
        names = {"client": client, "folder": model_dir}
        exec(blocks["client"], names)
        assert (names["report"].tokens, names["report"].causes) == (24, ())  # type: ignore[attr-defined]
    store.close()
    write_served_model("data", ServedModel(str(model_dir), renderer.tokenizer.sha256, renderer.fingerprint))
    server = StandIn(renderer, model=Halves())  # type: ignore[arg-type]
    with running(server.app) as url:
        for name in ("teacher", "sampler"):
            command = (
                blocks[name]
                .removeprefix("$ tokentape ")
                .replace("path/to/model", str(model_dir))
                .replace("path/to/data", str(tmp_path / "data"))
                .replace("http://127.0.0.1:8000", url)
            )
            # The client has scored the sampler's column before.
            done = CliRunner().invoke(app, [*shlex.split(command), "--again"])
            assert done.exit_code == 0, done.output
            if name == "sampler":
                (shown,) = re.findall(r"```text\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
                assert_same_lines(shown, done.output)
    with SqliteStore.open(tmp_path / "data", read_only=True) as again:
        (trajectory,) = again.load_session("s", per_token=True).trajectories()
    trained = trajectory.loss_mask
    np.testing.assert_array_equal(trajectory.columns["teacher_logprobs"][trained], -0.5)
    np.testing.assert_allclose(trajectory.columns["sampler_logprobs"][trained], trajectory.logprobs[trained], atol=1e-4)
