from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tokentape.chat import _grammar as grammar
from tokentape.chat._certificate import Certificate
from tokentape.chat._certificate_cache import load_or_certify
from tokentape.chat._certification import certify
from tokentape.chat._renderer import Renderer

pytestmark = pytest.mark.usefixtures("quick_proofs")

HOSTILE = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content or '' }}<|im_end|>
{% if m.role == 'system' and not loop.first %}{{ raise_exception('\x1b[2Jgone') }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
"""Refuses later system messages with a reason that would clear a terminal."""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    path = tmp_path / "hostile.jinja"
    path.write_text(HOSTILE, encoding="utf-8")
    return path


def test_report_contains_the_results(run: Run, model_dir: Path, renderer: Renderer) -> None:
    done = run("certify", model_dir)
    assert (done.exit_code, done.stderr) == (0, "")
    certificate = load_or_certify(renderer, {})
    assert certificate.fingerprint[:16] in done.stdout
    for continuation in certificate.continuations:
        assert "/" in continuation.name or f" {continuation.name} " in done.stdout
    for check in certificate.parsing:
        assert f" {check.name} " in done.stdout
    for what in certificate.dropped:
        assert f"  {what}\n" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_report_shows_the_smallest_counterexample(run: Run, model_dir: Path) -> None:
    """The tiny model's template drops the reasoning of earlier turns."""
    done = run("certify", model_dir)
    note = done.stdout.partition("the turn is written differently once the conversation goes on")[2]
    assert 'user       "What is a questionword?"\n' in note
    assert 'user       "  then a nextword\\n\\n"\n' in note


def test_report_explains_its_strategies(run: Run, model_dir: Path, hostile: Path) -> None:
    done = run("certify", model_dir, "--chat-template", hostile)
    lines = [line.split() for line in done.stdout.splitlines()]
    explained = {line[0] for line in lines if line and line[0] in ("local", "contextual", "fork", "refused")}
    assert explained == {"local", "refused"}


def test_template_can_not_control_the_terminal(run: Run, model_dir: Path, hostile: Path) -> None:
    done = run("certify", model_dir, "--chat-template", hostile)
    assert "\\x1b[2Jgone" in done.stdout
    assert "\x1b" not in done.stdout


def test_json_is_the_certificate(
    run: Run, model_dir: Path, renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "NAMES", ("user", "tool"))
    monkeypatch.setenv("TOKENTAPE_CACHE", str(tmp_path))
    done = run("certify", model_dir, "--json", "--kwargs", '{"a": 1}')
    assert Certificate.from_json(done.stdout) == certify(renderer, {"a": 1})


def test_certified_requirement_is_exit_code_0(run: Run, model_dir: Path) -> None:
    assert run("certify", model_dir, "--require", "user, tools+user,calls,injection,reasoning").exit_code == 0


def test_uncertified_requirement_is_named_and_exit_code_1(run: Run, model_dir: Path, hostile: Path) -> None:
    done = run("certify", model_dir, "--chat-template", hostile, "--require", "system,user,calls,reasoning", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["call_style"] is None
    system, calls, reasoning = done.stderr.splitlines()
    assert system.startswith("not certified: system: the chat template refused this conversation")
    assert calls.startswith("not certified: calls: ")
    assert reasoning.startswith("not certified: reasoning: ")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--require", "user,nonsense"], "tools+user"),
        (["--kwargs", "[1]"], "JSON object"),
        (["--kwargs", "{"], "expected a JSON object, found {: Expecting"),
    ],
)
def test_invalid_option_is_exit_code_2(run: Run, model_dir: Path, arguments: list[str], reason: str) -> None:
    done = run("certify", model_dir, *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert reason in done.stderr


def test_uncached_hub_name_is_exit_code_2_without_a_download(run: Run) -> None:
    done = run("certify", "somebody/some-model")
    assert done.exit_code == 2
    assert "nothing is downloaded" in done.stderr


def test_cached_certificate_is_used_unless_disabled(
    run: Run, model_dir: Path, hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "NAMES", ("user",))
    monkeypatch.setenv("TOKENTAPE_CACHE", str(tmp_path / "cache"))
    certify_it = ("certify", model_dir, "--chat-template", hostile)
    run(*certify_it, "--no-cache")
    assert not (tmp_path / "cache" / "certificates").exists()
    run(*certify_it)
    (path,) = (tmp_path / "cache" / "certificates").iterdir()
    path.write_text(path.read_text(encoding="utf-8").replace('"injection_safe": true', '"injection_safe": false'))
    assert json.loads(run(*certify_it, "--json").stdout)["injection_safe"] is False
    assert json.loads(run(*certify_it, "--json", "--no-cache").stdout)["injection_safe"] is True
