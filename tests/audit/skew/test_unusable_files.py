"""Files on which `tokenizers` panics, or ends the process: an error with what to do, from every face of the audit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import Command
from tokentape.audit import audit
from tokentape.audit._lock import make_lock, write_lock
from tokentape.audit._model_files import loading_settings
from tokentape.chat import _tokenizer_files as tokenizer_files
from tokentape.demo import MODEL
from tokentape.errors import TokenizerUnusable

PANICS, ENDS = "##", "#"
"""A prefix longer than the second pieces of merges, and one that ends within a character of such a piece."""


def _folder(tmp_path: Path, prefix: str) -> Path:
    folder = tmp_path / "mutant"
    shutil.copytree(MODEL, folder)
    spec = json.loads((folder / "tokenizer.json").read_bytes())
    if prefix == ENDS:
        spec["model"]["merges"].insert(0, ["a", "\u0120"])
        spec["model"]["vocab"]["a\u0120"] = 1 + max(spec["model"]["vocab"].values())
    spec["model"]["continuing_subword_prefix"] = prefix
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return folder


def _run(*arguments: str | Path) -> tuple[int, str]:
    """Return the exit code of a command in its own process, and its stderr."""
    with Command(arguments) as process:
        stderr = process.stderr.read()
        return process.wait(), stderr


@pytest.mark.parametrize("prefix", [PANICS, ENDS])
def test_library_panics_or_ends_the_process(tmp_path: Path, prefix: str) -> None:
    load = "import sys, tokenizers; tokenizers.Tokenizer.from_file(sys.argv[1])"
    file = _folder(tmp_path, prefix) / "tokenizer.json"
    done = subprocess.run([sys.executable, "-c", load, str(file)], capture_output=True, text=True, timeout=300)
    assert "PanicException" in done.stderr if prefix == PANICS else done.returncode < 0


@pytest.mark.parametrize("prefix", [PANICS, ENDS])
@pytest.mark.parametrize("side", ["", pytest.param("auto:", marks=pytest.mark.slow)])
def test_a_prefix_that_does_not_fit_the_merges_is_an_error_of_the_audit(tmp_path: Path, side: str, prefix: str) -> None:
    code, stderr = _run("audit", MODEL, f"{side}{_folder(tmp_path, prefix)}")
    assert code == 2, stderr
    assert f"continuing_subword_prefix is {prefix!r}" in stderr
    assert "Set continuing_subword_prefix to" in stderr
    assert not {"Traceback", "panicked"} & {word for line in stderr.splitlines() for word in line.split()}


def test_a_decoder_on_which_the_library_panics_is_an_error(tmp_path: Path) -> None:
    spec = json.loads((MODEL / "tokenizer.json").read_bytes())
    spec["decoder"] = {"type": "Strip", "content": "a", "start": 1, "stop": 1}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(TokenizerUnusable, match="can't decode with it"):
        audit(tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("tokenizer.json", "null", "can't load tokenizer.json"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}', "expected objects with `name`"),
    ],
)
def test_an_error_names_the_folder(tmp_path: Path, file: str, text: str, message: str) -> None:
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(TokenizerUnusable, match=message) as raised:
        audit(MODEL, tmp_path)
    assert str(raised.value).startswith(f"{tmp_path}: ")


def test_an_added_token_with_a_key_that_is_no_id_differs(tmp_path: Path) -> None:
    spec = json.loads((MODEL / "tokenizer.json").read_bytes())
    token = {key: value for key, value in spec["added_tokens"][0].items() if key != "id"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"x": token}}))
    assert loading_settings(tmp_path, spec)["tokenizer_config.json"] == {"added_tokens_decoder": {"x": token}}


def test_a_prefix_that_does_not_fit_the_merges_is_an_error_of_check(tmp_path: Path) -> None:
    write_lock(make_lock(MODEL), tmp_path / "tokentape.lock")
    code, stderr = _run("check", tmp_path / "tokentape.lock", _folder(tmp_path, ENDS))
    assert code == 2, stderr
    assert "continuing_subword_prefix" in stderr


def test_any_panic_of_the_library_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_files, "refuse_short_merges", lambda source: None)
    source = (_folder(tmp_path, PANICS) / "tokenizer.json").read_text()
    with pytest.raises(TokenizerUnusable, match=r"tokenizers [\d.]+ can't load tokenizer\.json: slice index"):
        tokenizer_files.from_text(source)


@pytest.mark.parametrize("merges", [[["a", "##b"], ["a", "##\u0120"]], ["a ##b", "a ##\u0120"]])
def test_a_prefix_that_fits_the_merges_loads(merges: object) -> None:
    model = {"vocab": {"a": 0, "##b": 1, "ab": 2, "##\u0120": 3, "a\u0120": 4}, "merges": merges}
    source = json.dumps({"model": {"type": "BPE", "continuing_subword_prefix": "##", **model}})
    assert tokenizer_files.from_text(source).get_vocab_size() == 5
