"""Changes are drawn over every path of the files, the same ones for the same seed, and can be undone by area."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.audit.mutator.changes import Change, apply
from tests.audit.mutator.drawing import draw, places
from tests.audit.mutator.files import TINY, TOKENIZER, load, write
from tests.audit.mutator.undo import AREAS, areas_between, exchange

SEEDS = range(120)


def test_a_seed_draws_the_same_changes_each_time() -> None:
    assert [draw(TINY, seed)[1] for seed in range(20)] == [draw(TINY, seed)[1] for seed in range(20)]


@pytest.mark.parametrize("changes", [1, 2])
def test_every_draw_changes_the_files(changes: int) -> None:
    base = load(TINY)
    for seed in SEEDS:
        drawn, made = draw(TINY, seed, changes)
        assert areas_between(base, drawn)
        model = base
        for change in made:
            changed = apply(model, [change])
            assert changed.docs.get(change.file) != model.docs.get(change.file), change
            model = changed


def test_changes_read_from_json_make_the_same_files() -> None:
    for seed in SEEDS:
        model, changes = draw(TINY, seed, 2)
        read = [Change.from_json(json.loads(json.dumps(change.to_json()))) for change in changes]
        assert apply(load(TINY), read).docs == model.docs


def test_every_area_of_the_files_is_drawn() -> None:
    drawn = {area for seed in range(700) for area in areas_between(load(TINY), draw(TINY, seed)[0])}
    assert drawn >= set(places(load(TINY))) - {"generation_config.json"}  # its entries are all ids


def test_a_table_is_drawn_no_more_often_than_a_setting() -> None:
    drawn = [areas_between(load(TINY), draw(TINY, seed)[0]) for seed in SEEDS]
    assert sum("vocabulary" in areas or "merges" in areas for areas in drawn) < len(drawn) / 3


def test_every_value_has_a_place_with_an_area() -> None:
    found = places(load(TINY))
    assert set(found) <= set(AREAS)
    paths = {(file, path) for area in found.values() for group in area.values() for file, path in group}
    for file, path in [
        (TOKENIZER, ("pre_tokenizer", "pretokenizers", 0, "pattern", "Regex")),
        (TOKENIZER, ("model", "ignore_merges")),
        (TOKENIZER, ("added_tokens", 8, "lstrip")),
        ("tokenizer_config.json", ("eos_token",)),
        ("config.json", ("vocab_size",)),
        ("generation_config.json", ("eos_token_id", 1)),
        ("chat_template.jinja", ()),
    ]:
        assert (file, path) in paths


def test_exchanging_all_differing_areas_makes_the_other_model() -> None:
    base = load(TINY)
    for seed in SEEDS:
        model, _ = draw(TINY, seed, 2)
        areas = areas_between(base, model)
        assert exchange(base, model, areas).docs == model.docs
        assert exchange(model, base, areas).docs == base.docs


def test_exchanging_one_area_leaves_the_others() -> None:
    base = load(TINY)
    normalizer = Change(TOKENIZER, "set", ("normalizer",), None)
    setting = Change(TOKENIZER, "set", ("model", "ignore_merges"), True)
    both = apply(base, [normalizer, setting])
    assert exchange(both, base, {"normalizer"}).docs == apply(base, [setting]).docs


def test_written_files_are_read_back(tmp_path: Path) -> None:
    model, _ = draw(TINY, 3)
    folder = write(model, tmp_path / "model")
    assert json.loads((folder / TOKENIZER).read_text(encoding="utf-8")) == model.docs[TOKENIZER]
