"""The record compared with its retokenized and rerendered versions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.scripted import ScriptedEngine
from tests.records import SETUP, make_turn
from tests.searching import examples
from tests.viewer.packed import header, unpack
from tokentape._session.flatten import trajectories
from tokentape._session.tree import Session
from tokentape.chat._renderer import Renderer
from tokentape.errors import InvalidRequest
from tokentape.gateway._app import create_app
from tokentape.gateway._serve import running
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore
from tokentape.store._served_model import ServedModel
from tokentape.types import SessionInfo, Trajectory, Turn
from tokentape.viewer._comparing import RecordReader, comparison, reader_of
from tokentape.viewer._source import SessionView, StoreSource

# The names are not in alphabetical order, as people write them.
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]


def turn_of(ids: list[int]) -> Turn:
    return make_turn("s", 0, completion_ids=np.array(ids, np.int32), logprobs=np.zeros(len(ids), np.float32))


def view_of(store: SqliteStore, ids: list[int]) -> SessionView:
    asyncio.run(store.write(SessionInfo("s", 1.0), SETUP, turn_of(ids)))
    return StoreSource(store, "").load("s")


def shown(view: SessionView) -> Trajectory:
    return view.trajectories[-1]


def test_word_sampled_letter_by_letter_is_a_difference_with_a_class(renderer: Renderer, store: SqliteStore) -> None:
    spelled = [token_id for letter in "Let" for token_id in renderer.tokenizer.encode_plain(letter)]
    view = view_of(store, spelled)
    packed = comparison(RecordReader(renderer.tokenizer), view, shown(view), "retokenized")
    metadata, arrays = header(packed), unpack(packed)
    own = shown(view).token_ids
    (difference,) = [item for item in metadata["differences"] if item["class"] == "word"]
    assert difference["meaning"]
    changed = metadata["differences"].index(difference) + 1
    start, end, other_start, other_end = arrays["segments"].reshape(-1, 4)[arrays["differs"].tolist().index(changed)]
    assert own[start:end].tolist() == spelled
    assert arrays["other_token_ids"][other_start:other_end].tolist() == renderer.tokenizer.encode_plain("Let")
    assert metadata["changed_trained_tokens"] == 3


@given(data=st.data())
@settings(max_examples=examples(40))
def test_segments_cover_both_sides_and_equal_ones_are_equal(renderer: Renderer, data: st.DataObject) -> None:
    texts = st.text(st.sampled_from('ab 1.é\n{"🫠漢'), max_size=8)
    ids = [
        token_id
        for text in data.draw(st.lists(texts, min_size=1))
        for token_id in renderer.tokenizer.encode_plain(text)
    ]
    tree = Session(SessionInfo("s", 1.0), [turn_of(ids or [5])])
    (trajectory,) = trajectories(tree)
    packed = comparison(
        RecordReader(renderer.tokenizer), SessionView(tree.info, "1", (), (trajectory,)), trajectory, "retokenized"
    )
    arrays = unpack(packed)
    at = other_at = 0
    for (start, end, other_start, other_end), differs in zip(
        arrays["segments"].reshape(-1, 4).tolist(), arrays["differs"].tolist(), strict=True
    ):
        assert (start, other_start) == (at, other_at)
        equal = np.array_equal(trajectory.token_ids[start:end], arrays["other_token_ids"][other_start:other_end])
        assert equal == (differs == 0)
        at, other_at = end, other_end
    assert (at, other_at) == (len(trajectory.token_ids), len(arrays["other_token_ids"]))


def test_without_drift_rerendering_gives_the_recorded_ids(store: SqliteStore, renderer: Renderer) -> None:
    """Rerendering keeps the request's order of the tools' keys."""
    engine = ScriptedEngine(renderer, ["four<|im_end|>"])
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "2 + 2?"}], "tools": TOOLS, "max_tokens": 4}
    with running(create_app(Turns(engine, renderer, store), model_id="m")) as url:
        assert httpx2.post(f"{url}/sessions/s/v1/chat/completions", json=body).status_code == 200
        view = StoreSource(store, "").load("s")
    packed = comparison(RecordReader(renderer.tokenizer, renderer), view, shown(view), "rerendered")
    assert header(packed)["differences"] == []
    assert unpack(packed)["other_token_ids"].tolist() == shown(view).token_ids.tolist()


def test_without_tokenizer_messages_or_template_nothing_is_compared(renderer: Renderer, store: SqliteStore) -> None:
    view = view_of(store, [5])
    for reader, side in (
        (RecordReader(why_none="it is gone"), "retokenized"),
        (RecordReader(renderer.tokenizer), "rerendered"),
    ):
        with pytest.raises(InvalidRequest):
            comparison(reader, view, shown(view), side)


def test_record_is_read_with_its_model_while_available(model_dir: Path, renderer: Renderer, tmp_path: Path) -> None:
    assert "doesn't name" in reader_of(None).why_none
    sha256, fingerprint = renderer.tokenizer.sha256, renderer.fingerprint
    reader = reader_of(ServedModel(str(model_dir), sha256, fingerprint))
    assert reader.tokenizer is not None
    assert reader.renderer is not None
    assert reader_of(ServedModel(str(model_dir), sha256, "another template")).renderer is None
    assert "has changed" in reader_of(ServedModel(str(model_dir), "another tokenizer", "x")).why_none
    gone = ServedModel(str(tmp_path / "gone"), "", "")
    assert "no longer" in reader_of(gone).why_none
    assert reader_of(gone, model_dir).tokenizer is not None
