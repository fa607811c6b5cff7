"""docs/how-to/ray.md: its Python runs or at least imports, and Serve and the gateway accept its config file."""

from __future__ import annotations

import ast
import asyncio
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.postgres import Server
from tests.records import SETUP, make_chain
from tokentape import ray
from tokentape._settings import env_name
from tokentape.config import resolve, settings
from tokentape.store import open_record
from tokentape.types import SessionInfo

PAGE = (Path(__file__).parents[2] / "docs/how-to/ray.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(CONFIG,) = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))


@pytest.mark.parametrize("code", BLOCKS)
def test_imports_of_the_page_exist(code: str) -> None:
    for statement in ast.walk(ast.parse(code)):
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("tokentape"):
            module: Any = importlib.import_module(str(statement.module))
            assert {name.name for name in statement.names} <= vars(module).keys()


def test_the_config_files_arguments_are_settings(tmp_path: Path) -> None:
    (application,) = CONFIG["applications"]
    module, _, name = application["import_path"].partition(":")
    assert getattr(importlib.import_module(module), name) is ray.app
    keys = tmp_path / "keys"
    keys.write_text("team=0123456789abcdef")
    arguments = {**application["args"], "keys_file": str(keys)}
    assert arguments.keys() <= settings().keys()
    environment = {
        env_name(key): ",".join(value) if isinstance(value, list) else value for key, value in arguments.items()
    }
    config = resolve({}, environment).config
    assert (config.engine.urls, config.store) == (("http://10.0.0.1:8000",), arguments["store"])


@pytest.mark.ray
def test_serve_takes_the_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from ray.serve.schema import ServeDeploySchema

    parsed = ServeDeploySchema.model_validate(CONFIG)
    (application,) = parsed.applications
    keys = tmp_path / "keys"
    keys.write_text("team=0123456789abcdef")
    assert isinstance(application.args, dict)
    built = ray.app({**application.args, "keys_file": str(keys)})
    assert [deployment.name for deployment in application.deployments] == [built._bound_deployment.name]


@pytest.mark.ray
def test_code_of_the_page_runs(
    cluster: None, postgres: Server, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"<!-- executed by [\w/.]+ -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    place = postgres.new_place()
    # Ids of the tiny model, which has fewer than those records have.
    few = {"added_ids": 7, "completion_ids": 9}
    with open_record(place) as store:
        (turn,) = make_chain("s", 1, **{name: _ids(value) for name, value in few.items()})
        asyncio.run(store.write(SessionInfo("s", 1.0), SETUP, turn))
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.jsonl").write_text(json.dumps({"text": "some text"}))
    for old, new in {
        "postgresql://tokentape@db.internal/tokentape": place,
        "/shared/exports/2026-11": tmp_path / "out",
        "/shared/corpus": tmp_path / "corpus",
        "/models/Qwen3-8B": model_dir,
        "/models/train": model_dir,
        "/models/serve": model_dir,
    }.items():
        assert old in code
        code = code.replace(old, str(new))
    exec(code, {})
    assert capsys.readouterr().out.splitlines()[0] == "1 8"
    postgres.drop(place)


def _ids(value: int) -> Any:
    import numpy as np

    return np.full(4, value, np.int32)
