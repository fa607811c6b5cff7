from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tokentape.config import settings

KEY = "LEAKMARKER-LEAKMARKER"


@pytest.fixture(autouse=True)
def _file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = f'model_id = "filed"\n[keys]\nalice = "{KEY}"\n[engine]\napi_key = "{KEY}"\n'
    Path("tokentape.toml").write_text(text, encoding="utf-8")
    monkeypatch.setenv("TOKENTAPE_HOST", "127.0.0.2")


def test_each_setting_is_shown_with_its_source(run: Run) -> None:
    shown = json.loads(run("config", "show", "--json", "--port", 9).stdout)
    assert shown["file"] == "tokentape.toml"
    shown_settings = {name: (setting["value"], setting["source"]) for name, setting in shown["settings"].items()}
    assert shown_settings["port"] == (9, "flag")
    assert shown_settings["host"] == ("127.0.0.2", "env")
    assert shown_settings["model_id"] == ("filed", "file")
    assert shown_settings["history"] == ("sampled", "default")
    assert list(shown_settings) == list(settings())


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_secrets_are_hidden(run: Run, form: list[str]) -> None:
    done = run("config", "show", *form)
    assert "LEAKMARKER" not in done.stdout
    assert done.stdout.count("***") == 2


def test_printed_configuration_is_toml(run: Run) -> None:
    printed = tomllib.loads(run("config", "show", "--engine", "vllm", "--engine-url", "http://a:1").stdout)
    assert printed["engine"]["urls"] == ["http://a:1"]
    assert printed["keys"] == {"alice": "***"}


def test_texts_outside_of_ascii_are_printed_as_toml(run: Run) -> None:
    name = "é\U0001f600\x7f\x01"
    assert tomllib.loads(run("config", "show", "--model-id", name).stdout)["model_id"] == name


def test_config_show_accepts_exactly_the_options_of_serve(run: Run) -> None:
    done = run("config", "show", "--prot", 9)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "No such option" in done.stderr


def test_invalid_file_is_exit_code_2(run: Run, tmp_path: Path) -> None:
    (tmp_path / "tokentape.toml").write_text("prot = 9", encoding="utf-8")
    done = run("config", "show")
    assert done.exit_code == 2
    assert "did you mean 'port'?" in done.stderr
