from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Run

pytestmark = pytest.mark.usefixtures("quick_models")


@pytest.fixture
def lockfile(run: Run, model_dir: Path, tmp_path: Path) -> Path:
    path = tmp_path / "tokentape.lock"
    done = run("lock", model_dir, "-o", path)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{path}: ")
    return path


@pytest.fixture
def edited(model_dir: Path, tmp_path: Path) -> Path:
    """Return the tiny model with another template, which would clear a terminal."""
    folder = tmp_path / "edited"
    shutil.copytree(model_dir, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    template = folder / "chat_template.jinja"
    template.write_text("{#\x9b2J#}x" + template.read_text(encoding="utf-8"), encoding="utf-8")
    return folder


def test_unchanged_model_is_clean(run: Run, lockfile: Path, model_dir: Path) -> None:
    done = run("check", lockfile, model_dir, "--strict")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "is as locked" in done.stdout


def test_two_locks_of_a_model_are_byte_identical(run: Run, lockfile: Path, model_dir: Path, tmp_path: Path) -> None:
    run("lock", model_dir, "-o", tmp_path / "again.lock")
    assert (tmp_path / "again.lock").read_bytes() == lockfile.read_bytes()


def test_edited_template_is_reported_and_can_not_control_the_terminal(run: Run, lockfile: Path, edited: Path) -> None:
    done = run("check", lockfile, edited)
    assert done.exit_code == 1
    assert "is not as locked: template" in done.stdout
    assert "\\x9b2J" in done.stdout
    assert "\x9b" not in done.stdout


def test_the_findings_as_json(run: Run, lockfile: Path, edited: Path) -> None:
    done = run("check", lockfile, edited, "--json")
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert report["ok"] is False
    assert report["reports"][0]["changes"][0]["what"] == "template"


def test_the_findings_as_a_page(run: Run, lockfile: Path, edited: Path, tmp_path: Path) -> None:
    page = tmp_path / "check.html"
    done = run("check", lockfile, edited, "--html", page)
    written = page.read_text(encoding="utf-8")
    assert done.exit_code == 1
    assert all(part in written for part in ("not as locked", "template", "golden ids", "expected", "\\x9b2J"))
    assert "\x9b" not in written
    assert "is an input of this command" in run("check", lockfile, edited, "--html", lockfile).output


def test_a_gateway_is_compared_beside_the_model(run: Run, lockfile: Path, model_dir: Path, gateway_url: str) -> None:
    done = run("check", lockfile, model_dir, "--engine", gateway_url)
    assert done.exit_code == 0
    assert "the gateway server is as locked" in done.stdout
    assert "note: not compared: " in done.stdout


def test_other_kwargs_than_locked_are_a_finding(run: Run, lockfile: Path, model_dir: Path) -> None:
    done = run("check", lockfile, model_dir, "--kwargs", '{"x": 1}')
    assert done.exit_code == 1
    assert 'template kwargs: were {}, are {"x": 1}' in done.stdout


def test_unreachable_server_is_a_failure(run: Run, lockfile: Path) -> None:
    done = run("check", lockfile, "--engine", "http://127.0.0.1:9")
    assert done.exit_code == 2
    assert "is it running?" in done.stderr


def test_incomparable_arguments_are_a_usage_error(run: Run, lockfile: Path, model_dir: Path, tmp_path: Path) -> None:
    assert run("check", lockfile).exit_code == 2
    assert run("check", model_dir / "config.json", model_dir).exit_code == 2
    assert run("check", lockfile, tmp_path / "nowhere").exit_code == 2
    assert run("check", lockfile, model_dir, "--kind", "x").exit_code == 2
    assert run("lock", tmp_path / "nowhere").exit_code == 2


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (b"\xff\xfe{{ 1 }}", "expected UTF-8 text"),
        (b"", "does not render the content of an assistant message"),
        (b"{{ messages[-1].content }}", "does not render the content of an assistant message"),
    ],
)
def test_invalid_chat_template_is_not_locked(
    run: Run, model_dir: Path, tmp_path: Path, template: bytes, message: str
) -> None:
    (tmp_path / "a.jinja").write_bytes(template)
    done = run("lock", model_dir, "--chat-template", tmp_path / "a.jinja", "-o", tmp_path / "a.lock")
    assert (done.exit_code, message in done.stderr) == (2, True)
    assert not (tmp_path / "a.lock").exists()


def test_missing_kwargs_differ_from_locked_kwargs(run: Run, model_dir: Path, gateway_url: str, tmp_path: Path) -> None:
    run("lock", model_dir, "-o", tmp_path / "a.lock", "--kwargs", '{"shout": true}')
    assert run("check", tmp_path / "a.lock", "--engine", gateway_url).exit_code == 0
    done = run("check", tmp_path / "a.lock", "--engine", gateway_url, "--kwargs", "{}")
    assert done.exit_code == 1
    assert "template kwargs" in done.stdout


def test_lock_reports_its_file_as_json(run: Run, model_dir: Path, tmp_path: Path) -> None:
    made = json.loads(run("lock", model_dir, "-o", tmp_path / "a.lock", "--json").stdout)
    assert made["file"] == str(tmp_path / "a.lock")
    assert made["goldens"] > made["refused"] >= 0
    assert made["template_sha256"] in (tmp_path / "a.lock").read_text()
