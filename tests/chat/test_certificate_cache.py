from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tokentape.chat import _certificate_cache as certificate_cache
from tokentape.chat import _disk_cache as disk_cache
from tokentape.chat._certificate import Certificate
from tokentape.chat._certificate_cache import load_or_certify
from tokentape.chat._certification import certify
from tokentape.chat._disk_cache import cache_directory
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate


class Counted:
    """Count the requested certificates. Computes each certificate once for all tests of this file."""

    known: ClassVar[dict[tuple[str, str], Certificate]] = {}

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0
        monkeypatch.setattr(certificate_cache, "certify", self)

    def __call__(self, renderer: Renderer, template_kwargs: Any) -> Certificate:
        self.made += 1
        key = renderer.fingerprint, json.dumps(template_kwargs)
        if key not in self.known:
            self.known[key] = certify(renderer, template_kwargs)
        return self.known[key]


@pytest.fixture(scope="module")
def renderer(renderer: Renderer) -> Renderer:
    """Return the renderer of a template that is certified quickly."""
    turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    return Renderer(renderer.tokenizer, ChatTemplate(turns + prompt))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def test_certificate_is_computed_once(renderer: Renderer, tmp_path: Path, counted: Counted) -> None:
    first = load_or_certify(renderer, {}, tmp_path / "new")
    assert load_or_certify(renderer, {}, tmp_path / "new") == first
    assert counted.made == 1
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".json"]


def test_certificates_depend_on_kwargs_template_and_source(
    renderer: Renderer, tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_or_certify(renderer, {}, tmp_path)
    assert load_or_certify(renderer, {"a": [1]}, tmp_path).template_kwargs == {"a": [1]}
    other = Renderer(renderer.tokenizer, ChatTemplate(renderer.template.source + " "))
    assert load_or_certify(other, {}, tmp_path).fingerprint == other.fingerprint
    monkeypatch.setattr(certificate_cache, "certifier_digest", lambda: "changed")
    load_or_certify(renderer, {}, tmp_path)
    assert counted.made == 4


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b'{"format": 1}', b"[1]"])
def test_corrupt_certificate_file_is_replaced(
    renderer: Renderer, tmp_path: Path, counted: Counted, damage: bytes
) -> None:
    made = load_or_certify(renderer, {}, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage)
    assert load_or_certify(renderer, {}, tmp_path) == made
    assert Certificate.from_json(path.read_text(encoding="utf-8")) == made
    assert counted.made == 2


def test_certificate_file_of_another_model_is_replaced(renderer: Renderer, tmp_path: Path, counted: Counted) -> None:
    made = load_or_certify(renderer, {}, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(made.to_json().replace(renderer.fingerprint, "0" * 64), encoding="utf-8")
    assert load_or_certify(renderer, {}, tmp_path) == made
    assert counted.made == 2


def test_unwritable_cache_works_and_is_logged_once(
    renderer: Renderer, tmp_path: Path, counted: Counted, caplog: pytest.LogCaptureFixture
) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert load_or_certify(renderer, {}, taken / "certificates").fingerprint == renderer.fingerprint
    assert counted.made == 2
    (record,) = caplog.records
    assert "TOKENTAPE_CACHE" in record.message


def test_failed_write_leaves_no_file(renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    load_or_certify(renderer, {}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_oldest_certificates_are_evicted(renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_MOST", 2)
    for age, name in enumerate(("a", "b", "c")):
        old = tmp_path / f"{name}.json"
        old.write_text("")
        os.utime(old, (1000 - age, 1000 - age))
    load_or_certify(renderer, {}, tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} > {"a"}
    assert len(list(tmp_path.iterdir())) == 2


def test_file_removed_by_another_process_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "old.json").write_text("")
    removed = [tmp_path / "old.json", tmp_path / "removed.json"]
    monkeypatch.setattr(Path, "glob", lambda *_: iter([*removed, tmp_path / "new.json"]))
    monkeypatch.setattr(disk_cache, "_MOST", 2)
    disk_cache.keep(tmp_path / "new.json", "{}")
    assert not caplog.records
    assert {path.name for path in tmp_path.iterdir()} == {"old.json", "new.json"}


def test_cache_directory_is_the_configured_or_the_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENTAPE_CACHE", "/chosen")
    assert cache_directory("certificates") == Path("/chosen/certificates")
    monkeypatch.delenv("TOKENTAPE_CACHE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory("certificates") == Path("/xdg/tokentape/certificates")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory("certificates") == Path("/home/me/.cache/tokentape/certificates")
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache_directory("certificates") == Path("/home/me/Library/Caches/tokentape/certificates")
