"""LoRA adapters of the embedded engine, compared with the model's forward pass with the adapter merged by hand."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if find_spec("peft") is None:  # Importing it costs each worker two seconds.
    pytest.skip("needs peft, of the extra adapters", allow_module_level=True)

from adapters import Forward, forward_with, largest_difference, record, write_adapter  # noqa: E402
from embedded import GREEDY, WARM, Sampled, collect, load, prompt, recomputed, sample  # noqa: E402
from forwards import Forwards  # noqa: E402

from tokentape.chat._renderer import Renderer  # noqa: E402
from tokentape.demo import MODEL  # noqa: E402
from tokentape.engines._adapters import Adapters  # noqa: E402
from tokentape.engines._base import Engine, SamplingParams  # noqa: E402
from tokentape.engines._kv import PrefixCache  # noqa: E402
from tokentape.engines._transformers import TransformersEngine  # noqa: E402
from tokentape.errors import EngineError, InvalidRequest, UnsupportedParameter  # noqa: E402
from tokentape.types import Turn  # noqa: E402

pytestmark = [
    # peft 0.21 with transformers 5.24, and the engine's own warning with an error.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:Found missing adapter keys"),
]
TOLERANCE = 2e-5  # Two passes in float32 differed by 1.04e-5 in a batch of 50; another adapter differs by 2 and more.
NAMES: list[str | None] = ["a", "b", None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def forwards_of(folder: Path) -> dict[str | None, Forward]:
    """Write adapters of the demonstration model to `folder` and return the forward pass of each."""
    return {None: forward_with({})} | {
        name: forward_with(write_adapter(folder / name, seed)) for seed, name in enumerate("ab")
    }


def record_embedded(folder: Path, data: Path, names: Sequence[str | None]) -> list[tuple[Turn, ...]]:
    async def opening(_: Renderer) -> Engine:
        return TransformersEngine.open(MODEL, threads=1, adapters={name: folder / name for name in "ab"})

    # All sessions ask the same, so only the adapter separates their cached prefixes.
    return record(opening, data, names, "What is 17 + 2?", SamplingParams(max_tokens=12))


@pytest.mark.parametrize("sessions", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_concurrent_sessions_are_sampled_with_their_adapters(
    folder: Path, forwards_of: dict[str | None, Forward], tmp_path: Path, sessions: int
) -> None:
    names = [NAMES[number % 3] for number in range(sessions)]
    own, others = [], []
    for name, turns in zip(names, record_embedded(folder, tmp_path, names), strict=True):
        assert [turn.adapter for turn in turns] == [name, name]
        differences = {name: largest_difference(forward, turns) for name, forward in forwards_of.items()}
        own.append(differences.pop(name))
        others += differences.values()
    print(f"sessions {len(own)}, own adapter at most {max(own):.1e}, another at least {min(others):.1e}")
    assert max(own) < TOLERANCE
    assert min(others) > 1000 * TOLERANCE


def test_swapped_adapters_are_detected(
    folder: Path, forwards_of: dict[str | None, Forward], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Adapters.of

    def swapped(self: Adapters, rows: list[Any]) -> Any:
        a, b = self.current["a"], self.current["b"]
        return right(self, [{a: b, b: a}.get(row, row) for row in rows])

    monkeypatch.setattr(Adapters, "of", swapped)
    sessions = dict(zip(NAMES, record_embedded(folder, tmp_path, NAMES), strict=True))
    assert largest_difference(forwards_of[None], sessions[None]) < TOLERANCE
    for name, other in ("ab", "ba"):
        assert largest_difference(forwards_of[name], sessions[name]) > 1000 * TOLERANCE
        assert largest_difference(forwards_of[other], sessions[name]) < TOLERANCE


@pytest.fixture(scope="module")
def added(folder: Path, untrained_dir: Path) -> dict[str, dict[str, Any]]:
    """Return the additions of adapters to the weights of the random model."""
    return {name: write_adapter(folder / name, seed, untrained_dir) for seed, name in enumerate(("one", "two"))}


@pytest.fixture
def engine(untrained_dir: Path, folder: Path, added: object) -> Iterator[TransformersEngine]:
    engine = TransformersEngine.open(untrained_dir, adapters={"policy.lora": folder / "one"})
    yield engine
    asyncio.run(engine.close())


def with_adapter(params: SamplingParams, name: str = "policy.lora") -> SamplingParams:
    return replace(params, adapter=name)


def assert_sampled_with(untrained_dir: Path, added: dict[str, Any], sampled: Sampled, prompt_ids: Any) -> None:
    rows = forward_with(added, untrained_dir)(np.concatenate([prompt_ids, sampled.ids]).astype(np.int32))
    expected = rows[np.arange(len(prompt_ids) - 1, len(rows) - 1), sampled.ids]
    # As in the engine, ids that the tokenizer lacks have probability 0.
    known = torch.from_numpy(rows[len(prompt_ids) - 1 : -1, :300]).logsumexp(-1).numpy()
    assert np.abs(expected - known - sampled.logprobs).max() < TOLERANCE


def versions(sampled: Sampled) -> set[str | None]:
    return {delta.weight_version for delta in sampled.deltas if delta.token_ids}


def test_new_calls_use_the_new_version_and_running_calls_keep_the_old(
    engine: TransformersEngine,
    untrained_dir: Path,
    folder: Path,
    added: dict[str, dict[str, Any]],
    forwards: Forwards,
) -> None:
    ids = prompt(9)

    async def main() -> tuple[Sampled, Sampled, Sampled]:
        forwards.go_on.clear()
        running = asyncio.create_task(collect(engine, ids, with_adapter(WARM), request_id="old"))
        await asyncio.sleep(0)  # the call has been requested
        loading = asyncio.create_task(engine.load_adapter("policy.lora", folder / "two", "step-2"))
        forwards.go_on.set()
        await loading
        return await running, await collect(engine, ids, with_adapter(WARM)), await collect(engine, ids, WARM)

    old, new, without = asyncio.run(main())
    assert (versions(old), versions(new), versions(without)) == ({"0"}, {"step-2"}, {"0"})
    assert_sampled_with(untrained_dir, added["one"], old, ids)
    assert_sampled_with(untrained_dir, added["two"], new, ids)
    assert_sampled_with(untrained_dir, {}, without, ids)
    asyncio.run(engine.load_adapter("policy.lora", folder / "one", "step-3"))
    assert_sampled_with(untrained_dir, added["one"], sample(engine, ids, with_adapter(WARM)), ids)


@pytest.mark.parametrize("shared", [False, True])
def test_adapters_never_share_cached_prefixes(
    engine: TransformersEngine,
    untrained_dir: Path,
    added: dict[str, dict[str, Any]],
    forwards: Forwards,
    monkeypatch: pytest.MonkeyPatch,
    shared: bool,
) -> None:
    if shared:  # the fault
        put, longest = PrefixCache.put, PrefixCache.longest
        monkeypatch.setattr(PrefixCache, "put", lambda self, ids, layers, weights: put(self, ids, layers))
        monkeypatch.setattr(PrefixCache, "longest", lambda self, context, weights: longest(self, context))
    ids = prompt(40)
    for params, own in ((with_adapter(WARM), added["one"]), (WARM, {}), (with_adapter(WARM), added["one"])):
        sampled = sample(engine, ids, params)
        if shared and params is WARM:
            with pytest.raises(AssertionError):
                assert_sampled_with(untrained_dir, own, sampled, ids)
            return
        assert_sampled_with(untrained_dir, own, sampled, ids)
    # The third call uses the prefix of the first.
    assert [columns for _, columns in forwards if columns > 1] == [40, 40]


def test_unused_adapter_versions_are_dropped(untrained_dir: Path, folder: Path, added: object) -> None:
    adapters = Adapters(load(untrained_dir), dtype="float32")
    for version, used in (("1", []), ("2", []), ("3", ["first"]), ("4", [])):
        before = [adapter.key for adapter in adapters.current.values()]
        adapters.load("policy", folder / "one", version, before if used else [])
        assert len(adapters.with_all.peft_config) == (2 if used else 1)


def test_adapter_can_be_added_later_and_scores_are_of_the_base_model(
    untrained_dir: Path, model: Any, folder: Path, added: dict[str, dict[str, Any]]
) -> None:
    engine = TransformersEngine.open(untrained_dir)
    ids = prompt(9)
    with pytest.raises(UnsupportedParameter, match="adapter"):
        sample(engine, ids, with_adapter(WARM))
    asyncio.run(engine.load_adapter("policy.lora", folder / "two", "7"))
    with pytest.raises(InvalidRequest, match=r"unknown adapter 'other'; loaded are policy\.lora"):
        sample(engine, ids, with_adapter(WARM, "other"))
    sampled = sample(engine, ids, with_adapter(GREEDY))
    assert_sampled_with(untrained_dir, added["two"], sampled, ids)
    context = np.concatenate([ids, sampled.ids]).astype(np.int32)
    scores = asyncio.run(engine.score(context, len(ids)))
    expected = recomputed(model, ids, sampled.ids).gather(1, torch.tensor(sampled.ids)[:, None])[:, 0]
    assert np.abs(scores.logprobs - expected.numpy()).max() < TOLERANCE
    with pytest.raises(EngineError, match="weights can't be updated while adapters are loaded"):
        asyncio.run(engine.update_weights(untrained_dir, "1"))
    asyncio.run(engine.close())


def _without_weights(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()


def _with(**settings: Any) -> Callable[[Path], None]:
    def change(adapter: Path) -> None:
        file = adapter / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))

    return change


def _of_another_model(adapter: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = adapter / "adapter_model.safetensors"
    save_file({name.replace(".layers.1.", ".layers.9."): tensor for name, tensor in load_file(file).items()}, file)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_weights, r"no adapter_model\.safetensors in .*expected a folder"),
        (_with(r=3), "size mismatch"),
        (_with(target_modules=["nothing"]), "Target modules"),
        (_with(bias="all"), r"its config sets \{'bias': 'all'\}"),
        (_with(init_lora_weights="pissa"), r"its config sets \{'init_lora_weights': 'pissa'\}"),
        (_with(use_dora=True), r"its config sets \{'use_dora': True\}"),
        (_with(alora_invocation_tokens=[5], task_type="CAUSAL_LM"), r"sets \{'alora_invocation_tokens': \[5\]\}"),
        (_with(new_method=[5]), r"sets \{'new_method': \[5\]\}"),
        (_of_another_model, "the adapter and the model differ in"),
    ],
)
def test_mismatched_adapter_is_refused_and_the_others_stay(
    engine: TransformersEngine,
    untrained_dir: Path,
    added: dict[str, dict[str, Any]],
    tmp_path: Path,
    damage: Callable[[Path], None],
    message: str,
) -> None:
    write_adapter(tmp_path / "damaged", 2, untrained_dir)
    damage(tmp_path / "damaged")
    with pytest.raises(EngineError, match=message):
        asyncio.run(engine.load_adapter("policy.lora", tmp_path / "damaged", "1"))
    sampled, without = (sample(engine, prompt(9), params) for params in (with_adapter(WARM), WARM))
    assert versions(sampled) == {"0"}
    assert_sampled_with(untrained_dir, added["one"], sampled, prompt(9))
    assert_sampled_with(untrained_dir, {}, without, prompt(9))


def test_settings_that_are_empty_or_have_no_effect_are_accepted(
    engine: TransformersEngine, untrained_dir: Path, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "new", 2, untrained_dir)
    _with(loftq_config=None, use_dora=None, megatron_core=None, init_lora_weights="gaussian")(tmp_path / "new")
    asyncio.run(engine.load_adapter("policy.lora", tmp_path / "new", "1"))


def test_an_unexpected_error_of_peft_does_not_end_the_engine(
    engine: TransformersEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("unexpected")

    monkeypatch.setattr(Adapters, "load", fail)
    with pytest.raises(KeyError, match="unexpected"):
        asyncio.run(engine.load_adapter("policy.lora", folder / "two", "1"))
    assert sample(engine, prompt(9), WARM).ids


def test_missing_peft_is_named_in_the_error(
    untrained_dir: Path, folder: Path, added: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(EngineError, match="need peft"):
        TransformersEngine.open(untrained_dir, adapters={"policy": folder / "one"})
