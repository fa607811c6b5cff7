"""Stop strings, schemas and limits of complete calls, against slow models of how servers look for stop strings."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.decoders import DecodeStream

from tests.data import REAL
from tests.gateway.scripted import ScriptedEngine, run_turn
from tokentape.chat._parse import Reply
from tokentape.chat._renderer import Renderer
from tokentape.chat._tokenizer import Tokenizer
from tokentape.engines._base import SPECULATED, SampleDelta, SamplingParams
from tokentape.errors import EngineContractError
from tokentape.gateway._completion_checks import check_json, check_stop_strings, limited_by_server
from tokentape.gateway._events import TurnRequest
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore

WORDS = ["the", "answer", "is", "42", "don't", "it's", "we've", "Observation:", "STOP", "END", "<b>", "</answer>", "a"]
WORDS += [".", ",", "!", "?", ")", "}", "```", "\n\n", "\n", "\u00e9", "\u00fc", "\u65e5\u672c", "\U0001f642"]
FAMILIES = ["qwen3", "llama3", "mistral_v3_spm", "gpt_oss", "deepseek_v31"]


@dataclass
class Served:
    """A tokenizer as Tokentape reads it and as servers do."""

    ours: Tokenizer
    theirs: tokenizers.Tokenizer

    @classmethod
    def load(cls, folder: Path) -> Served:
        return cls(Tokenizer.load(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))

    def decode(self, ids: Sequence[int], *, skip: bool = False) -> str:
        text: str = self.theirs.decode(list(ids), skip_special_tokens=skip)
        return text


@dataclass
class Call:
    """What a server got and returned."""

    ids: list[int]
    stop: str | None
    strings: list[str]
    min_tokens: int
    late: int = 0

    def check(self, served: Served) -> None:
        check_stop_strings(served.ours, self.ids, self.stop, self.strings, self.min_tokens, self.late)


Server = Callable[[Served, list[int], list[str], int], Call]


def vllm(served: Served, ids: list[int], strings: list[str], min_tokens: int, *, skip: bool = False) -> Call:
    """Appends what the decoder releases after each token, and looks at what came after `min_tokens`."""
    stream, text = DecodeStream(skip_special_tokens=skip), ""
    for count, token_id in enumerate(ids, 1):
        before = len(text)
        try:
            text += stream.step(served.theirs, token_id) or ""
        except Exception as error:
            assert "Invalid prefix" in str(error)  # noqa: PT017
            stream = DecodeStream(skip_special_tokens=skip)
            text += stream.step(served.theirs, token_id) or ""
        for string in strings:
            if count > min_tokens and string in text[max(before - len(string) + 1, 0) :] and len(text) > before:
                return Call(ids[:count], string, strings, min_tokens)
    return Call(ids, None, strings, min_tokens)


def vllm_chat(served: Served, ids: list[int], strings: list[str], min_tokens: int) -> Call:
    return vllm(served, ids, strings, min_tokens, skip=True)


def sglang(served: Served, ids: list[int], strings: list[str], min_tokens: int, *, clean: bool = False) -> Call:
    """Decodes as many tokens as the longest string has when it is encoded alone, and one, after each token."""
    longest = max(len(served.theirs.encode(string, add_special_tokens=False).ids) for string in strings)
    for count in range(1, len(ids) + 1):
        text = served.decode(ids[max(count - longest - 1, 0) : count])
        text = cleaned(text) if clean else text
        for string in strings:
            if string in text:
                return Call(ids[:count], string, strings, 0)
    return Call(ids, None, strings, min_tokens)


def sglang_clean(served: Served, ids: list[int], strings: list[str], min_tokens: int) -> Call:
    return sglang(served, ids, strings, min_tokens, clean=True)


def speculating(served: Served, ids: list[int], strings: list[str], min_tokens: int) -> Call:
    """Samples several tokens per step, and looks at the length before it looks at strings (SGLang 0.5.5)."""
    longest = max(len(served.theirs.encode(string, add_special_tokens=False).ids) for string in strings)
    count = 0
    while count < len(ids):
        step = 1 + sum(ids[: count + 1]) % 7
        count = min(count + step, len(ids))
        text = served.decode(ids[max(count - longest - step, 0) : count])
        for string in strings:
            if string in text and count < len(ids):
                return Call(ids[:count], string, strings, 0, SPECULATED)
    return Call(ids, None, strings, 0, SPECULATED)


def llamacpp(served: Served, ids: list[int], strings: list[str], min_tokens: int) -> Call:
    """Looks at as many last bytes as the string and the newest token have. Control tokens are no text."""
    text = b""
    for count, token_id in enumerate(ids, 1):
        piece = b"" if served.ours.control_by_id(token_id) else served.ours.token_bytes(token_id)
        text += piece
        if incomplete(text):
            continue
        for string in strings:
            if string.encode() in text[max(len(text) - len(string.encode()) - len(piece), 0) :]:
                return Call(ids[:count], string, strings, 0)
    return Call(ids, None, strings, 0)


def incomplete(text: bytes) -> bool:
    return any(
        text[-n : -n + 1 or None] >= lead and n < size for n in (1, 2, 3) for lead, size in LEADS if len(text) >= n
    )


LEADS = [(b"\xf0", 4), (b"\xe0", 3), (b"\xc0", 2)]


def cleaned(text: str) -> str:
    """What transformers does to decoded text with `clean_up_tokenization_spaces`."""
    for drop in (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(drop, drop.strip())
    return text


SERVERS: list[Server] = [vllm, vllm_chat, sglang, sglang_clean, speculating, llamacpp]


def completions(served: Served, seed: int, count: int) -> list[tuple[list[int], list[str], int]]:
    """Random ids, stop strings of which about half occur in them, and `min_tokens`."""
    pick, found = random.Random(seed), []
    controls = [control.id for control in served.ours.controls]
    for _ in range(count):
        ids: list[int] = []
        for _ in range(pick.randrange(1, 12)):
            kind = pick.random()
            if kind < 0.6:
                text = pick.choice(["", " "]) + " ".join(pick.choices(WORDS, k=pick.randrange(1, 5)))
                ids += served.theirs.encode(text, add_special_tokens=False).ids
            elif kind < 0.8:
                ids += [
                    i
                    for letter in pick.choice(WORDS)
                    for i in served.theirs.encode(letter, add_special_tokens=False).ids
                ]
            elif kind < 0.9 and controls:
                ids.append(pick.choice(controls))
            else:
                ids.append(pick.randrange(served.ours.vocab_size - 1))
        ids = [i for i in ids if served.theirs.id_to_token(i) is not None] or served.theirs.encode("a").ids
        text = served.decode(ids)
        begin = pick.randrange(len(text) + 1)
        strings = [pick.choice(WORDS) or " ", text[begin : begin + pick.randrange(1, 9)] or " "]
        found.append(
            (ids, strings[: pick.randrange(1, 3)] if pick.random() < 0.5 else strings[1:], pick.choice([0, 0, 3, 9]))
        )
    return found


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.__name__)
def test_no_server_that_looks_for_stop_strings_is_refused(server: Server, model_dir: Path) -> None:
    served = Served.load(model_dir)
    for ids, strings, min_tokens in completions(served, 1, 1500):
        server(served, ids, strings, min_tokens).check(served)


@pytest.mark.real
@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_server_of_a_real_tokenizer_is_refused(family: str) -> None:
    served = Served.load(REAL / family)
    for ids, strings, min_tokens in completions(served, 2, 400):
        for server in SERVERS:
            server(served, ids, strings, min_tokens).check(served)


@pytest.mark.real
@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_server_that_ignores_a_stop_string_is_refused(family: str) -> None:
    served, pick, refused = Served.load(REAL / family), random.Random(3), 0
    for _ in range(300):
        text = " ".join(pick.choices(["one", "Two", "answer", "日本", "é", "x=1;", "<b>", "stopping"], k=12))
        ids = served.theirs.encode(text, add_special_tokens=False).ids
        begin = pick.randrange(1, len(ids) - 4)
        string = served.ours.decode(ids[begin : begin + pick.randrange(1, 4)])
        if "\ufffd" in string or not string.strip() or string[0].isspace():
            continue
        # The reference: the string is in the text well before the end.
        at = next(n for n in range(1, len(ids) + 1) if string in served.ours.decode(ids[:n]))
        if at < len(ids) and len(served.theirs.encode(string, add_special_tokens=False).ids) >= 3:
            refused += 1
            with pytest.raises(
                EngineContractError, match=rf"stop string 1 of the request \(tokens after it: {len(ids) - at}\)"
            ):
                Call(ids, None, [string], 0).check(served)
    assert refused > 20


@pytest.fixture(scope="module")
def tiny(model_dir: Path) -> Served:
    return Served.load(model_dir)


def ids_of(served: Served, *texts: str) -> list[int]:
    return [token_id for text in texts for token_id in served.ours.encode_plain(text)]


def test_a_stop_string_may_end_within_the_last_token(tiny: Served) -> None:
    ids = ids_of(tiny, "one two", " three")
    Call(ids, None, [" thr"], 0).check(tiny)
    Call(ids, " thr", [" thr"], 0).check(tiny)
    with pytest.raises(EngineContractError, match="after stop string 2"):
        Call([*ids, *ids_of(tiny, " four")], None, ["zzz", "hree"], 0).check(tiny)


def test_a_stop_string_counts_only_after_min_tokens(tiny: Served) -> None:
    ids = ids_of(tiny, "STOP", " and so on")
    length = len(ids_of(tiny, "STOP"))
    Call(ids, None, ["STOP"], length).check(tiny)
    with pytest.raises(EngineContractError, match="after stop string 1"):
        Call(ids, None, ["STOP"], length - 1).check(tiny)


def test_tokens_sampled_in_one_step_may_follow_a_stop_string(tiny: Served) -> None:
    ids = ids_of(tiny, "one STOP", *["x"] * SPECULATED)
    after = len(ids) - len(ids_of(tiny, "one STOP"))
    assert after == SPECULATED
    Call(ids, None, ["STOP"], 0, SPECULATED).check(tiny)
    Call(ids, "STOP", ["STOP"], 0).check(tiny)
    for call in (Call([*ids, ids[-1]], None, ["STOP"], 0, SPECULATED), Call([*ids, ids[-1]], "STOP", ["STOP"], 0)):
        with pytest.raises(EngineContractError, match=f"tokens after it: {after + 1}"):
            call.check(tiny)


def test_a_stop_string_that_is_not_there_is_refused(tiny: Served) -> None:
    with pytest.raises(EngineContractError, match="3 tokens that it returned don't contain"):
        Call(ids_of(tiny, "x", "y", "z"), "ZZZ", ["ZZZ"], 0).check(tiny)
    with pytest.raises(EngineContractError, match="don't contain"):
        Call(ids_of(tiny, "x"), "\n\n", ["\n\n"], 0).check(tiny)


def test_text_that_servers_decode_differently_is_not_checked(tiny: Served) -> None:
    broken = [next(i for i in range(300) if tiny.ours.token_bytes(i) == b"\xff")]
    Call([*ids_of(tiny, "STOP"), *broken, *ids_of(tiny, "x")], None, ["STOP"], 0).check(tiny)
    Call(broken, "ZZZ", ["ZZZ"], 0).check(tiny)


@pytest.mark.real
def test_text_inside_a_character_may_be_held_back() -> None:
    """llama.cpp looks for " " in the last two bytes when the character is complete, and these are inside it."""
    served = Served.load(REAL / "qwen3")
    space, rest = 636, next(i for i in range(256) if served.ours.token_bytes(i) == b"\x94")
    assert served.ours.token_bytes(space) == b" \xe2\x80"
    ids = [*ids_of(served, "a"), space, rest, *ids_of(served, "b", "c")]
    call = llamacpp(served, ids, [" "], 0)
    assert (call.ids, call.stop) == (ids, None)
    call.check(served)


END = "<|im_end|>"


class Faulty(ScriptedEngine):
    """Ends its replies as `ends` say."""

    ends: tuple[str, int | str | None]

    async def sample(self, *args: Any, **kwargs: Any) -> Any:
        deltas = [delta async for delta in super().sample(*args, **kwargs)]
        for delta in deltas[:-1]:
            yield delta
        yield replace(deltas[-1], finish_reason=self.ends[0], stop=self.ends[1])


def sample(
    renderer: Renderer, store: SqliteStore, reply: str, sampling: SamplingParams, **more: Any
) -> tuple[str, dict[str, Any]]:
    """Return the error's text, or an empty string, and the notes of the turn."""
    engine = Faulty(renderer, [reply], sampling=ScriptedEngine.EVERYTHING)
    end = renderer.tokenizer.control(END)
    assert end is not None
    engine.ends = more.pop("ends", ("stop", end.id))
    request = TurnRequest("s", ({"role": "user", "content": "q"},), (), {}, sampling, **more)

    async def work() -> str:
        turns = Turns(engine, renderer, store)
        try:
            async for _ in run_turn(turns, request):
                pass
        except EngineContractError as error:
            return str(error)
        return ""

    error = asyncio.run(work())
    if error:
        return error, {}
    turn = store.load_session("s").turns[-1]
    return "", dict(turn.sampling)


PARAMS = SamplingParams(max_tokens=500)


@pytest.mark.parametrize("stream", [False, True])
def test_an_ignored_stop_string_is_not_recorded(renderer: Renderer, store: SqliteStore, stream: bool) -> None:
    stopping = replace(PARAMS, stop_strings=("there",))
    error, _ = sample(renderer, store, f"<think>hm</think>hi there world{END}", stopping, stream=stream)
    assert "after stop string 1" in error
    with pytest.raises(Exception, match="there is no session"):
        store.load_session("s")


def test_a_stop_string_that_was_not_sampled_is_not_recorded(renderer: Renderer, store: SqliteStore) -> None:
    stopping = replace(PARAMS, stop_strings=("ZZZ",))
    assert "don't contain" in sample(renderer, store, "hi there", stopping, ends=("stop", "ZZZ"))[0]


SCHEMA = replace(PARAMS, json_schema="{}")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reply", ["not json", "", '{"a": 1', "{} and more", "<think>{}</think>no"])
def test_a_reply_that_ignores_a_schema_is_not_recorded(
    renderer: Renderer, store: SqliteStore, reply: str, stream: bool
) -> None:
    error, _ = sample(renderer, store, reply + END, SCHEMA, stream=stream)
    assert "did not follow the request's JSON schema" in error


@pytest.mark.parametrize("reply", ['{"a": "\\ud83d\n"}', " [1, 2]\n", "<think>a thought</think>\n\n{}", "1", "NaN"])
def test_a_reply_that_is_json_is_recorded(renderer: Renderer, store: SqliteStore, reply: str) -> None:
    assert sample(renderer, store, reply + END, SCHEMA)[0] == ""


def test_a_reply_that_did_not_end_need_not_be_json(renderer: Renderer, store: SqliteStore) -> None:
    assert sample(renderer, store, '{"a": 1', SCHEMA, ends=("length", None))[0] == ""
    brace = replace(SCHEMA, stop_strings=(":",))
    assert sample(renderer, store, '{"a":', brace, ends=("stop", ":"))[0] == ""


def test_reasoning_of_a_raw_prompt_may_come_before_json(renderer: Renderer) -> None:
    tokenizer = renderer.tokenizer
    end = tokenizer.control(END)
    assert end is not None
    raw = Reply(content="a thought{}", reasoning="", tool_calls=(), reasoning_open=False)
    check_json(tokenizer, tokenizer.encode_plain("a thought</think>{}" + END), raw, end.id)
    with pytest.raises(EngineContractError):
        check_json(tokenizer, tokenizer.encode_plain("a thought{}" + END), raw, end.id)
    # The request's own stop id may come before the end of the JSON.
    check_json(tokenizer, tokenizer.encode_plain('{"a'), replace(raw, content='{"a'), tokenizer.encode_plain("a")[0])


def test_a_limit_of_the_server_is_noted(
    renderer: Renderer, store: SqliteStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    error, notes = sample(renderer, store, "one two", PARAMS, ends=("length", None))
    assert not error
    sampled = len(renderer.tokenizer.encode_plain("one two"))
    assert notes["server_limit"] == sampled
    assert re.search(rf"ended a completion after {sampled} tokens; max_tokens is 500", caplog.text)


def test_only_a_limit_below_the_requests_is_the_servers(renderer: Renderer) -> None:
    info = replace(ScriptedEngine(renderer, []).info, max_context=100)
    for reason, sampled, prompt, most, found in [
        ("length", 9, 10, 500, True),
        ("length", 9, 10, 9, False),
        ("length", 8, 10, 9, True),
        ("stop", 8, 10, 9, False),
        ("length", 90, 10, 500, False),
        ("length", 88, 10, 500, False),
        ("length", 87, 10, 500, True),
    ]:
        assert limited_by_server(reason, sampled, prompt, SamplingParams(most), info) is found  # type: ignore[arg-type]


def test_an_end_without_tokens_is_checked_with_those_before(renderer: Renderer, store: SqliteStore) -> None:
    class Late(Faulty):
        async def sample(self, *args: Any, **kwargs: Any) -> Any:
            async for delta in super().sample(*args, **kwargs):
                yield replace(delta, finish_reason=None, stop=None)
            yield SampleDelta((), (), "length")

    engine = Late(renderer, ["a STOP b"], sampling=ScriptedEngine.EVERYTHING)
    engine.ends = ("length", None)
    request = TurnRequest(
        "s", ({"role": "user", "content": "q"},), (), {}, replace(PARAMS, stop_strings=("STOP",)), stream=True
    )

    async def work() -> None:
        async for _ in run_turn(Turns(engine, renderer, store), request):
            pass

    with pytest.raises(EngineContractError, match="after stop string 1"):
        asyncio.run(work())
