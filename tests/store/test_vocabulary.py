"""One vocabulary per record: ids that were recorded never mean other text."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete

from tests.postgres import Server
from tests.records import SETUP, make_turn
from tests.store.conftest import Place, Places
from tests.vocabularies import changed_source, changed_tokenizer, rename_added, swap_words
from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import InvalidRequest
from tokentape.store import Store, open_record, verify
from tokentape.store import _schema as schema
from tokentape.store._gateways import GatewayState, tell
from tokentape.store._location import note_served_model
from tokentape.store._served_model import ServedModel
from tokentape.types import SessionInfo

run = asyncio.run


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@pytest.fixture(scope="module")
def other(model_dir: Path) -> Tokenizer:
    return changed_tokenizer(model_dir)


@pytest.fixture
def place(places: Places) -> Place:
    return places.new()


def add_turn(store: Store) -> None:
    run(store.write(SessionInfo("s", 0.0), SETUP, make_turn("s", 0)))


def forget(store: Store) -> None:
    """Remove what earlier versions did not store."""
    run(
        store.transact(
            lambda connection: connection.execute(delete(schema.meta).where(schema.meta.c.key == "vocabulary")).close()
        )
    )


@pytest.mark.parametrize("change", [swap_words, rename_added])
def test_a_record_with_turns_refuses_another_vocabulary(
    place: Place, tokenizer: Tokenizer, model_dir: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    other = changed_tokenizer(model_dir, change)
    assert other.vocab_size == tokenizer.vocab_size
    with place.open() as store:
        run(store.bind(tokenizer))
        run(note_served_model(place.location, store, ServedModel("/models/first", tokenizer.sha256, "0")))
        add_turn(store)
    for _ in range(2):
        with place.open() as store, pytest.raises(InvalidRequest) as refused:
            run(store.bind(other))
        message = str(refused.value)
        assert f"({tokenizer.vocab_size} ids, digest {tokenizer.vocabulary_sha256[:16]}, last served from " in message
        assert f"/models/first). The tokenizer to serve has {other.vocab_size} ids, digest " in message
        assert other.vocabulary_sha256[:16] in message
        assert "use another --data directory, or another --store database" in message
    with place.open() as store:
        run(store.bind(tokenizer))
    assert verify(place.location).ok


def _resave(spec: dict[str, Any]) -> None:
    spec["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    spec["model"]["merges"].pop()
    spec["added_tokens"][0]["special"] = not spec["added_tokens"][0]["special"]
    spec["model"]["vocab"] = dict(sorted(spec["model"]["vocab"].items()))


def test_the_same_vocabulary_in_another_file_is_accepted(place: Place, tokenizer: Tokenizer, model_dir: Path) -> None:
    again = changed_tokenizer(model_dir, _resave)
    assert again.sha256 != tokenizer.sha256
    with place.open() as store:
        run(store.bind(tokenizer))
        add_turn(store)
        run(store.bind(again))


def test_added_tokens_count_the_same_in_the_vocabulary_and_beside_it(tokenizer: Tokenizer, model_dir: Path) -> None:
    def copy_in(spec: dict[str, Any]) -> None:
        spec["model"]["vocab"] |= {token.content: token.id for token in tokenizer.added_tokens}

    moved = changed_tokenizer(model_dir, copy_in)
    assert moved.sha256 != tokenizer.sha256
    assert moved.vocabulary_sha256 == tokenizer.vocabulary_sha256


def test_a_record_without_turns_changes_its_vocabulary_if_no_other_gateway_uses_it(
    place: Place, tokenizer: Tokenizer, other: Tokenizer
) -> None:
    with place.open() as store:
        run(store.bind(tokenizer))
        run(store.bind(other))
        run(store.transact(partial(tell, state=GatewayState("own", 1, 0, 0))))
        run(store.bind(tokenizer, "own"))
        for gateway_id in (None, "second"):
            with pytest.raises(InvalidRequest, match="belongs to another tokenizer"):
                run(store.bind(other, gateway_id))


@pytest.mark.parametrize("served", ["other", "same", "resaved", "gone", "damaged", None])
def test_the_vocabulary_of_an_older_record_is_that_of_its_model(
    place: Place,
    tokenizer: Tokenizer,
    model_dir: Path,
    tmp_path: Path,
    served: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "served"
    folder.mkdir()
    changes: dict[str, Callable[[dict[str, Any]], None]] = {"other": swap_words, "same": lambda spec: None}
    source = changed_source(model_dir, changes.get(served or "", _resave))
    if served == "same":
        source = (model_dir / "tokenizer.json").read_bytes()
    sha256 = Tokenizer(source, {}).sha256
    (folder / "tokenizer.json").write_bytes(b"{" if served == "damaged" else source)
    if served == "gone":
        shutil.rmtree(folder)
    with place.open() as store:
        add_turn(store)
        forget(store)
        if served is not None:
            run(note_served_model(place.location, store, ServedModel(str(folder), sha256, "0")))
    with place.open() as store:
        if served == "other":
            with pytest.raises(InvalidRequest, match=f"last served from {folder}"):
                run(store.bind(tokenizer))
            return
        run(store.bind(tokenizer))
        assert ("it is not known whether" in caplog.text) == (served in ("gone", "damaged"))
        with pytest.raises(InvalidRequest):
            run(store.bind(changed_tokenizer(model_dir)))


def test_of_two_gateways_that_start_at_once_with_two_vocabularies_one_is_refused(
    postgres: Server, tokenizer: Tokenizer, other: Tokenizer
) -> None:
    for _ in range(5):
        url = postgres.new_place()
        with open_record(url) as one, open_record(url) as two, ThreadPoolExecutor(2) as pool:

            def start(store: Store, name: str, served: Tokenizer) -> bool:
                run(store.transact(partial(tell, state=GatewayState(name, 1, 0, 0)), claims=frozenset()))
                try:
                    run(store.bind(served, name))
                except InvalidRequest:
                    return False
                return True

            started = [pool.submit(start, one, "a", tokenizer), pool.submit(start, two, "b", other)]
            assert sorted(future.result() for future in started) == [False, True]
        postgres.drop(url)
