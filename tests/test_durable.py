"""Files that are written completely or stay unchanged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tokentape._durable import durable_file, write_durably


def test_file_is_replaced_without_leftovers(tmp_path: Path) -> None:
    path = tmp_path / "some" / "folder" / "file"
    write_durably(path, b"one")
    write_durably(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]


def test_writers_of_one_path_at_the_same_time_leave_a_whole_file(tmp_path: Path) -> None:
    """Regression: the slower one wrote into the finished file of the other, and then failed."""
    path = tmp_path / "file"
    with durable_file(path) as slower:
        slower.write(b"slower")
        slower.flush()
        write_durably(path, b"one")
        slower.write(b" ends")
        slower.flush()
        assert path.read_bytes() == b"one"
    assert path.read_bytes() == b"slower ends"
    assert list(tmp_path.iterdir()) == [path]


def test_file_that_can_not_be_flushed_is_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int) -> None:
        raise OSError(5, "Input/output error")

    path = tmp_path / "file"
    write_durably(path, b"one")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        write_durably(path, b"two")
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]


def test_link_target_is_replaced_and_the_link_kept(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    file, link = tmp_path / "there" / "file", tmp_path / "link"
    file.write_bytes(b"one")
    link.symlink_to(file)
    write_durably(link, b"two")
    assert (link.is_symlink(), file.read_bytes()) == (True, b"two")


def test_fifo_is_written_directly(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_durably(fifo, b"one")
        assert os.read(reader, 10) == b"one"
    finally:
        os.close(reader)
    assert fifo.is_fifo()


def test_full_disk_names_the_file() -> None:
    with pytest.raises(OSError, match=r"free up space.*'/dev/full'"):
        write_durably(Path("/dev/full"), b"one")
