from __future__ import annotations

from pathlib import Path

import pytest

from tokentape.errors import InvalidRequest
from tokentape.store._location import is_record, open_record, shown


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("postgresql://me:secret@db/runs?sslpassword=secret", "postgresql://me:***@db/runs"),
        ("sftp://me:secret@host/runs", "sftp://me:***@host/runs"),
        ("sftp://me@host/runs", "sftp://me@host/runs"),
        ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
        ("runs/a:b@c", "runs/a:b@c"),
    ],
)
def test_passwords_are_not_shown(location: str, expected: str) -> None:
    assert shown(location) == expected


def test_error_for_writing_to_an_archive_hides_its_password() -> None:
    with pytest.raises(InvalidRequest, match="is read-only") as caught:
        open_record("sftp://me:secret@host/runs")
    assert "secret" not in str(caught.value)


def test_urls_and_directories_are_records_and_other_paths_are_files(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").touch()
    (tmp_path / "folder.parquet").mkdir()
    assert is_record("postgresql://me@db/runs")
    assert is_record("s3://bucket/a.parquet")
    assert is_record(tmp_path / "folder.parquet")
    assert not is_record(tmp_path / "a.parquet")
    assert not is_record(str(tmp_path / "nothing"))
