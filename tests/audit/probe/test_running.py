"""Trials run, resumed and banned, on an engine with scripted choices and on the real embedded one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path

import pytest
from click.testing import Result as CliResult
from typer.testing import CliRunner

from tests.chat.conftest import load_tokenizer
from tokentape.audit._probe.running import (
    ProbeFile,
    ProbeResult,
    ProbeSettings,
    header,
    probe_layout,
    run_trials,
    summarise,
)
from tokentape.audit._probe.trials import Trial, outcome, read_texts, trials
from tokentape.chat import _grammar as grammar
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate
from tokentape.cli import app
from tokentape.engines._base import DISTRIBUTION, Engine, EngineInfo, SampleDelta, SamplingParams
from tokentape.errors import EngineUnavailable, InvalidRequest
from tokentape.types import Setup, TokenIds

TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RIGHTS = Trial("t", "The law protects the ", "rights", " of people.", "another word", 0)


class Written:
    """Greedy decoding over completions in order of preference: each id is the next one of the first that fits."""

    def __init__(self, completions: Sequence[Sequence[int]], prompt_length: int, *, alternatives: bool = True) -> None:
        self._completions, self._start = completions, prompt_length
        honoured = DISTRIBUTION if alternatives else DISTRIBUTION - {"top_logprobs"}
        self.info = EngineInfo("written", "1", "tiny", 1_000_000, 4096, "raw_logprobs", honoured)
        self.calls = 0

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, stream: bool, request_id: str
    ) -> AsyncGenerator[SampleDelta, None]:
        self.calls += 1
        ids = prompt_ids[self._start :].tolist()
        begun = len(ids)
        tops = []
        while len(ids) - begun < params.max_tokens:
            choices = dict.fromkeys(
                done[len(ids)] for done in self._completions if len(done) > len(ids) and list(done[: len(ids)]) == ids
            )
            if not choices:
                break
            tops.append(tuple((token_id, -float(n)) for n, token_id in enumerate(choices)))
            ids.append(next(iter(choices)))
        yield SampleDelta(tuple(ids[begun:]), (0.0,) * (len(ids) - begun), "stop", None, tuple(tops))

    async def check(self) -> None:
        pass

    async def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def qwen() -> Renderer:
    return Renderer(load_tokenizer("qwen3"), ChatTemplate(TEMPLATE))


def setup_of(renderer: Renderer) -> Setup:
    return grammar.setup(renderer.fingerprint, {}, tools=(), date=grammar.DATE)


def ids_of(renderer: Renderer, *pieces: str) -> list[int]:
    end = renderer.tokenizer.control("<|im_end|>")
    assert end is not None
    return [*(token_id for piece in pieces for token_id in renderer.tokenizer.encode_plain(piece)), end.id]


def written(renderer: Renderer, *completions: Sequence[str], alternatives: bool = True) -> Written:
    start = len(renderer.render(RIGHTS.messages, setup_of(renderer)).ids)
    return Written([ids_of(renderer, *pieces) for pieces in completions], start, alternatives=alternatives)


def run(engine: Engine, renderer: Renderer, settings: ProbeSettings, *trials_to_run: Trial) -> list[ProbeResult]:
    async def collect() -> list[ProbeResult]:
        async with aclosing(run_trials(trials_to_run, engine, renderer, setup_of(renderer), settings)) as results:
            return [result async for result in results]

    return asyncio.run(collect())


PHANTOM = ("The law protects the", " right", "s", " of people.")
SPLIT = ("The law protects the", " ", "rights", " of people.")
REPLACED = ("The law protects the", " lives", " of people.")


def test_phantom_edit_is_found_and_nothing_is_banned_by_default(qwen: Renderer) -> None:
    engine = written(qwen, PHANTOM, REPLACED)
    (result,) = run(engine, qwen, ProbeSettings(), RIGHTS)
    assert (result.outcome.kind, result.outcome.artifact, result.banned, engine.calls) == ("phantom", "tail", None, 1)
    assert list(result.completion) == ids_of(qwen, *PHANTOM)


def test_banned_ids_are_replaced_by_the_likeliest_other_id(qwen: Renderer) -> None:
    engine = written(qwen, PHANTOM, REPLACED)
    (result,) = run(engine, qwen, ProbeSettings(ban=True), RIGHTS)
    assert result.outcome.kind == "phantom"
    assert result.banned is not None
    assert result.banned.kind == "replaced"
    at = result.outcome.at
    assert result.bans == ((at, result.completion[at]),)
    assert engine.calls == 2


def test_bans_at_one_place_add_up(qwen: Renderer) -> None:
    (result,) = run(written(qwen, PHANTOM, SPLIT, REPLACED), qwen, ProbeSettings(ban=True), RIGHTS)
    assert result.banned is not None
    assert result.banned.kind == "replaced"
    assert len(result.bans) == 2
    assert len({at for at, _ in result.bans}) == 1


def test_phantom_edit_without_an_alternative_stays(qwen: Renderer) -> None:
    (result,) = run(written(qwen, PHANTOM), qwen, ProbeSettings(ban=True), RIGHTS)
    assert result.banned is not None
    assert result.banned.kind == "phantom"


def test_a_ban_on_an_engine_without_alternatives_is_refused(qwen: Renderer) -> None:
    engine = written(qwen, PHANTOM, alternatives=False)
    with pytest.raises(InvalidRequest, match="returns no top logprobs"):
        run(engine, qwen, ProbeSettings(ban=True), RIGHTS)
    with pytest.raises(InvalidRequest, match="temperature 0"):
        run(engine, qwen, ProbeSettings(ban=True, temperature=1.0), RIGHTS)


def test_the_summary_counts_with_intervals_and_the_page_shows_the_ids(qwen: Renderer) -> None:
    engine = written(qwen, PHANTOM, REPLACED)
    results = run(engine, qwen, ProbeSettings(ban=True), RIGHTS)
    results.append(ProbeResult(RIGHTS, (), outcome(RIGHTS, [], qwen.tokenizer)))
    found = summarise(results)
    assert (found.trials, found.strict.changed, found.strict.total) == (2, 1, 1)
    assert (found.outcomes["phantom"].share, found.outcomes["phantom"].clusters) == (0.5, 1)
    assert [(name, counts.changed) for name, counts in found.classes.items()] == [("tail", 1)]
    assert [(name, counts.changed) for name, counts in found.banned.items()] == [("replaced", 1)]
    shown = probe_layout(header(engine, qwen, setup_of(qwen), ProbeSettings(ban=True)), results, qwen.tokenizer).html()
    assert str(list(results[0].outcome.found)) in shown


def test_interrupted_probe_resumes(qwen: Renderer, tmp_path: Path) -> None:
    planned = list(trials(read_texts()[:3]))
    engine = written(qwen, REPLACED)
    made = header(engine, qwen, setup_of(qwen), ProbeSettings())
    path = tmp_path / "probe.jsonl"
    with ProbeFile(path, made) as keeping:
        for result in run(engine, qwen, ProbeSettings(), *planned[:4]):
            keeping.add(result)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with ProbeFile(path, made) as keeping:
        assert whole.startswith(path.read_bytes())
        assert path.read_bytes().endswith(b"\n")
        left = keeping.missing(planned)
        assert len(left) == 3
        for result in run(engine, qwen, ProbeSettings(), *left):
            keeping.add(result)
    with ProbeFile(path, made) as keeping:
        results = keeping.results
    assert json.loads(path.read_text().splitlines()[0]) == made
    assert sorted(result.trial.name for result in results) == sorted(planned_trial.name for planned_trial in planned)
    with pytest.raises(InvalidRequest, match=r"results of a different probe \(other temperature\)"):
        ProbeFile(path, {**made, "temperature": 1.0})


@pytest.mark.parametrize("content", ["", "{", '{"format": 1, "se'])
def test_truncated_first_line_is_rewritten(tmp_path: Path, content: str) -> None:
    path = tmp_path / "probe.jsonl"
    path.write_text(content)
    with ProbeFile(path, {"format": 1, "seed": 0}):
        assert path.read_text() == '{"format": 1, "seed": 0}\n'


@pytest.mark.parametrize("content", ["what somebody noted", '{"mine": 1}'])
def test_file_without_a_results_header_is_not_overwritten(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match="only line is not a header"):
        ProbeFile(path, {"format": 1, "seed": 0})
    assert path.read_text() == content


def test_results_before_an_engine_failure_are_kept(qwen: Renderer) -> None:
    engine = written(qwen, REPLACED)
    sample = engine.sample

    def failing(*args: object, **options: object) -> AsyncGenerator[SampleDelta, None]:
        if engine.calls == 2:
            raise EngineUnavailable("gone")
        return sample(*args, **options)  # type: ignore[arg-type]

    engine.sample = failing  # type: ignore[method-assign]
    seen = []

    async def collect() -> None:
        planned = list(trials(read_texts()[:3]))
        async with aclosing(run_trials(planned, engine, qwen, setup_of(qwen), ProbeSettings(concurrency=1))) as results:
            async for result in results:
                seen.append(result)

    with pytest.raises(EngineUnavailable):
        asyncio.run(collect())
    assert len(seen) == 2


def test_built_in_sentences_contain_their_word_once() -> None:
    texts = read_texts()
    assert len(texts) > 30
    for before, target, after in texts:
        assert target
        assert before.split()
        assert after.split()
        assert target not in before + after
    assert len({trial.name for trial in trials(texts, repetitions=2)}) == 4 * len(texts)


def test_sentences_of_a_file_are_read_in_three_ways(tmp_path: Path) -> None:
    path = tmp_path / "texts"
    path.write_text('a [bee] flew\n\n{"text": "two cats sat", "target": "cats"}\nsome plain words here\n')
    first, second, drawn = read_texts(path)
    assert first == ("a ", "bee", " flew")
    assert second == ("two ", "cats", " sat")
    assert drawn[1] in ("plain", "words", "here")
    assert "".join(drawn) == "some plain words here"
    assert read_texts(path)[2] == drawn


@pytest.mark.parametrize("line", ['{"text": "a", "target": "b"}', '{"text": 1}', "a b c"])
def test_a_file_without_words_to_replace_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "texts"
    path.write_text(line)
    with pytest.raises(InvalidRequest):
        read_texts(path)


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "texts").write_bytes(b"\xffa [bee] flew")
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        read_texts(tmp_path / "texts")


def command(*arguments: object) -> CliResult:
    return CliRunner().invoke(app, ["probe", *map(str, arguments)])


def test_command_probes_a_gateway_and_resumes(gateway_url: str, model_dir: Path, tmp_path: Path) -> None:
    output, report = tmp_path / "probe.jsonl", tmp_path / "probe.html"
    served = ("--engine", "vllm", "--engine-url", gateway_url, "--max-tokens", 16, "-o", output, "--ban")
    done = command(model_dir, *served, "--limit", 3, "--html", report)
    assert (done.exit_code, done.stdout.splitlines()[0]) == (3, "3 trials")
    assert "<h2>Outcomes</h2>" in report.read_text(encoding="utf-8")
    before = output.read_text(encoding="utf-8")
    done = command(model_dir, *served, "--limit", 4, "--json")
    assert json.loads(done.stdout)["trials"] == 4
    assert output.read_text(encoding="utf-8").startswith(before)
    assert len(output.read_text(encoding="utf-8").splitlines()) == 5


def test_unwritable_page_is_refused_before_any_request(gateway_url: str, model_dir: Path, tmp_path: Path) -> None:
    served = ("--engine", "vllm", "--engine-url", gateway_url, "--max-tokens", 4, "--limit", 1)
    done = command(model_dir, *served, "--html", tmp_path / "none" / "a.html")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "none" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["--engine", "vllm"], ["--repetitions", "2"], ["--ban", "--temperature", "1"], ["--kwargs", "[]"]],
)
def test_invalid_arguments_are_usage_errors(model_dir: Path, arguments: list[str]) -> None:
    assert command(model_dir, *arguments).exit_code == 2
