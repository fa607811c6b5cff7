"""Commands never write to files of a record or to their input."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tokentape.errors import InvalidRequest
from tokentape.store import SqliteStore, verify


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key.pem"
    path.write_text("a private key")
    return path


@pytest.mark.parametrize("name", ["tokentape.db", "tokentape.db-wal", "tokentape.lock", "model.json"])
@pytest.mark.parametrize("command", [("verify", "--head-out"), ("export", "-o"), ("drift", "--html")], ids=str)
def test_a_file_of_a_record_is_never_replaced(run: Run, data_dir: Path, command: tuple[str, str], name: str) -> None:
    before = (data_dir / "tokentape.db").read_bytes()
    done = run(command[0], data_dir, command[1], data_dir / name)
    assert done.exit_code != 0
    assert "would replace a record's file" in done.output
    assert (data_dir / "tokentape.db").read_bytes() == before


def test_files_of_other_records_links_and_archives_are_never_replaced(run: Run, data_dir: Path, tmp_path: Path) -> None:
    with SqliteStore.open(tmp_path / "other"):
        pass
    link = tmp_path / "link.jsonl"
    link.symlink_to(tmp_path / "other" / "tokentape.db")
    archive = tmp_path / "archive"
    assert run("archive", data_dir, "--to", archive, "--older-than", "0s").exit_code == 0
    for output in (tmp_path / "other" / "tokentape.db", link, next(archive.glob("*/turns.parquet"))):
        before = output.read_bytes()
        assert "would replace a record's file" in run("export", data_dir, "-o", output).output
        assert output.read_bytes() == before


def test_a_head_does_not_replace_the_key_it_is_signed_with(run: Run, data_dir: Path, key: Path) -> None:
    assert "is an input of this command" in run("verify", data_dir, "--head-out", key, "--sign", key).output
    with pytest.raises(InvalidRequest, match="is an input of"):
        verify(data_dir, head_out=key, sign=key)
    assert key.read_text() == "a private key"


def test_head_does_not_replace_its_comparison_head(run: Run, data_dir: Path, tmp_path: Path) -> None:
    head = tmp_path / "head.json"
    run("verify", data_dir, "--head-out", head)
    before = head.read_bytes()
    assert "is an input of" in run("verify", data_dir, "--against", head, "--head-out", head).output
    assert head.read_bytes() == before


def test_no_file_of_a_model_folder_is_replaced(run: Run, model_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    tokenizer = model / "tokenizer.json"
    before = tokenizer.read_bytes()
    for arguments in (
        ("lock", model, "-o", tokenizer),
        ("audit", f"auto:{model}", model_dir, "--html", tokenizer),
        ("premium", model_dir, "--corpus", tokenizer, "--html", tokenizer),
        ("probe", model, "--html", tokenizer),
    ):
        assert "is an input of this command" in run(*arguments).output
    assert tokenizer.read_bytes() == before


@pytest.mark.parametrize(
    "command", [("lock", "-o"), ("audit", "--html"), ("probe", "--html"), ("probe", "-o")], ids=str
)
def test_missing_output_folder_is_reported_before_the_work(
    run: Run, model_dir: Path, tmp_path: Path, command: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokentape.cli.lock.make_lock", None)
    monkeypatch.setattr("tokentape.cli.audit.audit_sides", None)
    monkeypatch.setattr("tokentape.chat._renderer.Renderer.load", None)
    more = [model_dir] * (1 + (command[0] == "audit"))
    done = run(command[0], *more, command[1], tmp_path / "nodir" / "x.html")
    assert "does not exist; create it" in done.output
    assert not (tmp_path / "nodir").exists()


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "slime"])
def test_an_export_is_written_to_a_fifo(run: Run, data_dir: Path, tmp_path: Path, kind: str) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        done = run("export", data_dir, "-o", fifo, "--format", kind)
        written = os.read(reader, 2**16)
    finally:
        os.close(reader)
    assert done.exit_code == 0, done.output
    run("export", data_dir, "-o", tmp_path / "file", "--format", kind)
    assert written == (tmp_path / "file").read_bytes()
    assert fifo.is_fifo()


def test_output_path_under_a_file_is_not_called_missing(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("")
    assert "is a file; expected a data" in " ".join(run("verify", tmp_path / "x.jsonl").output.replace("│", "").split())
