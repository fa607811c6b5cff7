from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tests.chat.conftest import setup_for
from tokentape.chat import _grammar as grammar
from tokentape.chat import _overrides as overrides
from tokentape.chat._certification import certify
from tokentape.chat._overrides import Completion, Overrides, find_overrides, parse_whole
from tokentape.chat._renderer import Renderer
from tokentape.chat._reply import Reply, ReplyDelta
from tokentape.errors import TokentapeError

Install = Callable[..., None]


class Entry:
    """An entry point with an already loaded function."""

    def __init__(self, name: str, function: object) -> None:
        self.name = name
        self.value = "nowhere:it"
        self._function = function

    def load(self) -> object:
        return self._function


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def install(*entries: Entry | EntryPoint) -> None:
        monkeypatch.setattr(overrides, "entry_points", lambda group: list(entries))

    return install


def shout(completion: Completion) -> Reply:
    return Reply(completion.text.upper(), "", (), reasoning_open=False)


def test_first_entry_point_by_name_with_a_result_is_used(renderer: Renderer, install: Install) -> None:
    install(
        Entry("c", lambda renderer: Overrides("third")),
        Entry("b", lambda renderer: Overrides("second")),
        Entry("a", lambda renderer: None),
    )
    assert find_overrides(renderer) == Overrides("second")


def test_explicit_overrides_come_before_entry_points(model_dir: Path, install: Install) -> None:
    install(Entry("a", lambda renderer: Overrides("entry")))
    overrides = Overrides("given")
    assert Renderer.load(model_dir, overrides=overrides).overrides is overrides
    assert Renderer.load(model_dir).overrides == Overrides("entry")


def test_failing_entry_point_is_named(renderer: Renderer, install: Install) -> None:
    def broken(renderer: Renderer) -> None:
        raise RuntimeError("no luck")

    install(Entry("mine", broken))
    with pytest.raises(TokentapeError, match=r"'mine'.*RuntimeError: no luck"):
        find_overrides(renderer)
    install(EntryPoint("lost", "no_such_module:overrides", overrides.GROUP))
    with pytest.raises(TokentapeError, match=r"'lost'.*no_such_module"):
        find_overrides(renderer)


def test_the_name_of_an_override_is_part_of_the_fingerprint(renderer: Renderer) -> None:
    def fingerprint(overrides: Overrides | None) -> str:
        return Renderer(renderer.tokenizer, renderer.template, overrides).fingerprint

    assert len({fingerprint(overrides) for overrides in (None, Overrides("a"), Overrides("b"))}) == 3
    assert fingerprint(None) == renderer.fingerprint


@pytest.mark.parametrize(("text", "stopped"), [("hi <think>there<|im_end|>", True), ("hi <think>there", False)])
def test_function_gets_the_completion_up_to_its_stop(renderer: Renderer, text: str, stopped: bool) -> None:
    seen: list[Completion] = []

    def parse(completion: Completion) -> Reply:
        seen.append(completion)
        return shout(completion)

    setup = setup_for(renderer)
    ids = renderer.tokenizer.encode_plain(text)
    parser = parse_whole(renderer, parse)(setup, ())
    for token_id in ids:
        assert parser.feed([token_id]) == ReplyDelta()
    rest, reply = parser.finish()
    assert seen == [Completion(tuple(ids), "hi <think>there", stopped, setup)]
    assert rest.content == reply.content == "HI <THINK>THERE"


def test_function_does_not_get_text_after_a_stop_string(renderer: Renderer) -> None:
    parser = parse_whole(renderer, shout)(setup_for(renderer), ["STOP"])
    parser.feed(renderer.tokenizer.encode_plain("so STOP it"))
    assert parser.finish()[1].content == "SO "


def test_a_function_that_fails_is_a_tokentape_error_without_the_completion_s_text(renderer: Renderer) -> None:
    def parse(completion: Completion) -> Reply:
        raise ValueError(completion.text)

    parser = parse_whole(renderer, parse)(setup_for(renderer), ())
    parser.feed(renderer.tokenizer.encode_plain("secret"))
    with pytest.raises(TokentapeError, match="ValueError") as raised:
        parser.finish()
    assert "secret" not in str(raised.value)


class Streaming:
    """A parser that reports every token as it arrives."""

    def __init__(self, renderer: Renderer) -> None:
        self._tokenizer = renderer.tokenizer
        self._told = ""

    def feed(self, ids: Iterable[int]) -> ReplyDelta:
        text = self._tokenizer.decode(ids)
        self._told += text
        return ReplyDelta(text)

    def finish(self) -> tuple[ReplyDelta, Reply]:
        return ReplyDelta(), Reply(self._told, "", (), reasoning_open=False)


def test_a_parser_with_state_may_stream(renderer: Renderer) -> None:
    overridden = Renderer(
        renderer.tokenizer, renderer.template, Overrides("streaming", lambda setup, stops: Streaming(renderer))
    )
    parser = overridden.parser(setup_for(overridden))
    assert parser.feed(renderer.tokenizer.encode_plain("hi")) == ReplyDelta("hi")
    assert parser.finish()[1].content == "hi"


def test_a_certificate_checks_the_overriding_parser(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    overridden = Renderer(renderer.tokenizer, renderer.template, Overrides("loud", parse_whole(renderer, shout)))
    monkeypatch.setattr(grammar, "NAMES", ("user", "tool"))
    certificate = certify(overridden)
    assert certificate.overrides == "loud"
    checks = {check.name: check.holds for check in certificate.parsing}
    assert checks["content"] is False
    assert certificate.continuations == certify(renderer).continuations


def test_a_parser_that_always_fails_is_not_certified(model_dir: Path) -> None:
    def fail(completion: Completion) -> Reply:
        raise KeyError("x")

    bare = Renderer.load(model_dir)
    broken = Renderer.load(model_dir, overrides=Overrides("broken", parser=parse_whole(bare, fail)))
    assert not any(check.holds for check in certify(broken).parsing)


def test_a_failed_parser_is_reported_with_the_line_that_failed(renderer: Renderer) -> None:
    def fail(completion: Completion) -> Reply:
        raise KeyError("x")

    broken = Renderer(renderer.tokenizer, renderer.template, Overrides("broken", parse_whole(renderer, fail)))
    parser = broken.parser(setup_for(broken))
    assert "KeyError in test_overrides.py" in parser.finish()[1].problem
