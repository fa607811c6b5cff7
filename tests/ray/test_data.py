"""Ray Data gives the same as a single process, bit for bit."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.postgres import Server
from tests.records import SETUP, make_chain
from tokentape._session.arrow import iter_parquet, trajectories_table
from tokentape.audit._drift.meter import measure_drift
from tokentape.audit._id_rows import Columns, iter_rows
from tokentape.audit._skew.auditor import audit
from tokentape.chat._renderer import Renderer
from tokentape.chat._tokenizer import Tokenizer
from tokentape.cli.app import app
from tokentape.errors import Conflict, InvalidRequest, NotFound
from tokentape.ray import audit_corpus, drift, export
from tokentape.store import open_record
from tokentape.types import SessionInfo

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


def spellings(tokenizer: Tokenizer, count: int, seed: int) -> list[dict[str, Any]]:
    """Return rows of ids, some with words in noncanonical tokens."""
    random = np.random.default_rng(seed)
    pieces = [tokenizer.encode_plain(piece) for piece in ("They", " co", "st", " 1", "2", ".", "\n", " cafés", "<END>")]
    rows = []
    for _ in range(count):
        ids = [token for at in random.integers(0, len(pieces), 12) for token in pieces[at]]
        mask = [int(at >= 3) for at in range(len(ids))]
        rows.append({"input_ids": ids, "loss_mask": mask, "domain": f"d{random.integers(60)}"})
    return rows


@pytest.fixture
def ids(renderer: Renderer, tmp_path: Path) -> Path:
    """Write a folder of Parquet files with several row groups each."""
    folder = tmp_path / "ids"
    folder.mkdir()
    for number in range(2):
        table = pa.Table.from_pylist(spellings(renderer.tokenizer, 90, number))
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=20)
    return folder


def test_drift_equals_that_of_a_single_process(
    ids: Path, renderer: Renderer, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokentape.audit._drift import meter

    # Several bootstrap batches, with boundaries unlike those of row groups.
    monkeypatch.setattr(meter, "BATCH_TOKENS", 1500)
    columns = Columns(by=("domain",))
    rows = chain.from_iterable(iter_rows(path, columns) for path in sorted(ids.iterdir()))
    expected = measure_drift(rows, renderer.tokenizer)
    assert expected.tokens.changed
    assert any(stratum.value == "other" for stratum in expected.strata)
    assert drift(ids, model_dir, columns=columns, actors=2, cpus=0.5) == expected


def test_actor_error_is_raised_unchanged(tmp_path: Path, model_dir: Path) -> None:
    path = tmp_path / "ids.parquet"
    pq.write_table(pa.table({"input_ids": [[10**6]]}), path)
    with pytest.raises(InvalidRequest, match="outside of the tokenizer"):
        drift(path, model_dir)


def test_no_files_are_an_error(tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(InvalidRequest, match="no Parquet files"):
        drift(tmp_path, model_dir)


def test_corpus_audit_equals_that_of_a_single_process(model_dir: Path, tmp_path: Path) -> None:
    skewed = tmp_path / "skewed"
    skewed.mkdir()
    spec = json.loads((model_dir / "tokenizer.json").read_text())
    (skewed / "tokenizer.json").write_text(json.dumps({**spec, "normalizer": None}))
    folder = tmp_path / "corpus"
    folder.mkdir()
    texts = [f"line {n} cafe{chr(0x301) if n % 97 == 0 else ''} and more words" for n in range(2000)]
    pq.write_table(pa.table({"text": texts}), folder / "a.parquet", row_group_size=300)
    (folder / "b.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts[:200]))
    expected = audit(model_dir, skewed, corpus=[folder], workers=1)
    report = audit_corpus(model_dir, skewed, folder, actors=2, cpus=0.5)
    assert expected.corpus is not None
    assert report.corpus is not None
    assert expected.corpus.differing
    same = {"seconds": 0.0}
    assert replace(report, corpus=replace(report.corpus, **same), **same) == replace(
        expected, corpus=replace(expected.corpus, **same), **same
    )


def test_server_is_refused_for_a_corpus_audit(model_dir: Path, tmp_path: Path) -> None:
    from tests.audit.skew.cases import TINY, healthy

    class Server:
        reopened_as = None

        def __init__(self) -> None:
            self.side = healthy(TINY)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.side, name)

    (tmp_path / "c.txt").write_text("some text")
    with pytest.raises(InvalidRequest, match="one side is a server"):
        audit_corpus(Server(), model_dir, tmp_path)


def write_sessions(location: Any, count: int) -> None:
    async def write() -> None:
        for number in range(count):
            name = f"s{number}"
            turns = make_chain(name, 1 + number % 3)
            await store.write(SessionInfo(name, float(number)), SETUP, *turns)

    with open_record(location) as store:
        asyncio.run(write())


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_an_export_has_the_rows_of_a_local_one(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    server: Server | None = request.getfixturevalue("postgres") if kind == "postgres" else None
    location = tmp_path / "data" if server is None else server.new_place()
    write_sessions(location, 23)
    exported = tmp_path / "one.parquet"
    done = CliRunner().invoke(app, ["export", str(location), "-o", str(exported), "--json"])
    assert done.exit_code == 0, done.output
    counts = export(location, tmp_path / "many", sessions_per_file=5, actors=2, cpus=0.5)
    files = sorted((tmp_path / "many").iterdir())
    assert [path.name for path in files] == [f"part-0000{n}.parquet" for n in range(5)]
    assert {path.name for path in tmp_path.iterdir()} >= {"many", "one.parquet"}
    assert not list(tmp_path.glob("many.part*"))
    assert {pq.read_schema(path) for path in files} == {pq.read_schema(exported)}
    rows = [row for path in files for row in iter_parquet(path)]
    # Compare printed values: NaN is not equal to itself.
    assert repr(trajectories_table(rows).to_pylist()) == repr(pq.read_table(exported).to_pylist())
    output = json.loads(done.stdout)
    assert (counts.sessions, counts.trajectories, counts.tokens, counts.trained_tokens) == (
        output["sessions"],
        output["trajectories"],
        output["tokens"],
        output["trained_tokens"],
    )
    if server is not None:
        server.drop(str(location))


def test_export_is_complete_or_absent(tmp_path: Path) -> None:
    write_sessions(tmp_path / "data", 2)
    with pytest.raises(NotFound):
        export(tmp_path / "data", tmp_path / "out", sessions=["s0", "nobody"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]
    (tmp_path / "out").mkdir()
    with pytest.raises(Conflict, match="already"):
        export(tmp_path / "data", tmp_path / "out")


def test_an_empty_record_gives_a_file_without_rows(tmp_path: Path) -> None:
    write_sessions(tmp_path / "data", 0)
    assert export(tmp_path / "data", tmp_path / "out").trajectories == 0
    assert list(iter_parquet(tmp_path / "out" / "part-00000.parquet")) == []
