"""External renderers: a correct one, and one for each broken promise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.chat.conftest import setup_for
from tokentape.chat import _grammar as grammar
from tokentape.chat._certification import certify
from tokentape.chat._external_renderer import ExternalRenderer
from tokentape.chat._overrides import Completion, Overrides
from tokentape.chat._renderer import Renderer
from tokentape.chat._strategy import choose
from tokentape.errors import InvariantViolation, TemplateRefused
from tokentape.types import Provenance

QUESTION = {"role": "user", "content": "hi"}


@dataclass
class Rendered:
    token_ids: list[int]


class Chat:
    """A minimal chat format, in ids of a real tokenizer."""

    def __init__(self, renderer: Renderer) -> None:
        self._tokenizer = renderer.tokenizer
        self._end = renderer.tokenizer.encode_plain("<|im_end|>")

    def _ids(self, message: Any) -> list[int]:
        text = message.get("content") or ""
        return [*self._tokenizer.encode_plain(f"<|im_start|>{message['role']}\n"), *self._body(text), *self._end]

    def _body(self, text: str) -> list[int]:
        return self._tokenizer.encode_after_control(text).ids

    def render_ids(self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False) -> list[int]:
        ids = [token_id for message in messages for token_id in self._ids(message)]
        return ids + self._tokenizer.encode_plain("<|im_start|>assistant\n") * add_generation_prompt

    def bridge_to_next_turn(self, prompt: list[int], completion: list[int], new: Any, *, tools: Any = None) -> Any:
        return Rendered(prompt + completion + self.render_ids(new, add_generation_prompt=True))

    def parse_response(self, token_ids: list[int]) -> Any:
        return Parsed(self._tokenizer.decode(token_ids).removesuffix("<|im_end|>"))


class Changing(Chat):
    """Encodes the completion again."""

    def bridge_to_next_turn(self, prompt: list[int], completion: list[int], new: Any, *, tools: Any = None) -> Any:
        again = self._tokenizer.encode_plain(self._tokenizer.decode(completion))
        return prompt + again + self.render_ids(new, add_generation_prompt=True)


class Short(Chat):
    """Loses the end of the context."""

    def bridge_to_next_turn(self, prompt: list[int], completion: list[int], new: Any, *, tools: Any = None) -> Any:
        return prompt[:-1]


class Reluctant(Chat):
    """Has no bridges for users."""

    def bridge_to_next_turn(self, prompt: list[int], completion: list[int], new: Any, *, tools: Any = None) -> Any:
        return None if new[-1]["role"] == "user" else super().bridge_to_next_turn(prompt, completion, new)


class Forged(Chat):
    """Encodes control tokens that callers spell."""

    def _body(self, text: str) -> list[int]:
        return self._tokenizer.encode_plain(text)


@dataclass
class Call:
    name: str | None
    arguments: Any
    status: str = "ok"
    token_span: tuple[int, int] | None = (1, 3)
    raw: str = "raw"
    id: str | None = None


@dataclass
class Parsed:
    content: str
    reasoning_content: str | None = None
    tool_calls: list[Call] = field(default_factory=list)
    reasoning_complete: bool | None = True


def overridden(renderer: Renderer, kind: type[Chat]) -> ExternalRenderer:
    return ExternalRenderer(renderer.tokenizer, renderer.template, Overrides(kind.__name__, renderer=kind(renderer)))


def bridged(renderer: Renderer, kind: type[Chat], completion: str = "y e s<|im_end|>") -> tuple[Any, Any, Any]:
    """Return prompt, completion, added ids, and the ids of the rerendered whole. The completion is in letters."""
    external = overridden(renderer, kind)
    setup = setup_for(external, tools=())
    tokenizer = renderer.tokenizer
    letters = completion.removesuffix("<|im_end|>")
    ids = [i for letter in letters for i in tokenizer.encode_plain(letter)] + tokenizer.encode_plain("<|im_end|>")
    completion_ids = tokenizer.array(ids)
    context_ids = np.concatenate([external.render([QUESTION], setup).ids, completion_ids])
    added = external.bridge(completion_ids, {"role": "assistant"}, [QUESTION], setup, context_ids=context_ids)
    return context_ids, added, external


def test_ids_of_an_external_renderer_are_used_unchanged(renderer: Renderer) -> None:
    external = overridden(renderer, Chat)
    rendered = external.render([QUESTION], setup_for(external))
    assert renderer.tokenizer.decode(rendered.ids) == "<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n"
    assert set(rendered.provenance) == {Provenance.TEMPLATE}


def test_bridge_of_an_external_renderer_is_its_added_ids(renderer: Renderer) -> None:
    _, added, _ = bridged(renderer, Chat)
    assert renderer.tokenizer.decode(added.ids) == "<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n"
    assert added.ids.dtype == np.int32
    assert len(added.provenance) == len(added.ids)


def test_a_bridge_that_changes_the_completion_is_an_invariant_violation(renderer: Renderer) -> None:
    with pytest.raises(InvariantViolation, match=r"does not keep the context.*in the completion"):
        bridged(renderer, Changing, "assistant user assistant<|im_end|>")


def test_a_bridge_that_is_shorter_than_the_context_is_an_invariant_violation(renderer: Renderer) -> None:
    with pytest.raises(InvariantViolation, match=r"differ from position \d+ on \(in the prompt\)"):
        bridged(renderer, Short)


def test_missing_external_bridge_is_a_refusal(renderer: Renderer) -> None:
    with pytest.raises(TemplateRefused, match="Reluctant has no bridge for messages with roles user"):
        bridged(renderer, Reluctant)


def test_external_bridge_needs_the_context(renderer: Renderer) -> None:
    external = overridden(renderer, Chat)
    with pytest.raises(InvariantViolation, match="pass `context_ids`"):
        external.bridge(external.tokenizer.array([1]), {"role": "assistant"}, [QUESTION], setup_for(external))


def test_external_renderer_parses_replies(renderer: Renderer) -> None:
    external = overridden(renderer, Chat)
    parser = external.parser(setup_for(external))
    parser.feed(renderer.tokenizer.encode_plain("hello<|im_end|>"))
    assert parser.finish()[1].content == "hello"


def test_calls_of_an_external_renderer_keep_status_and_span(renderer: Renderer) -> None:
    calls = [
        Call("add", {"a": 1}, id="c1"),
        Call("add", '{"a": 1}', token_span=None),
        Call("sub", {}),
        Call("add", None, "invalid_json"),
        Call("add", "no json"),
        Call(None, None, "missing_name"),
        Call("add", None, "unclosed_block"),
    ]

    class Calling(Chat):
        def parse_response(self, token_ids: list[int]) -> Any:
            return Parsed("", "hm", calls, reasoning_complete=False)

    external = overridden(renderer, Calling)
    reply = external.parse(Completion((1, 2, 3, 4), "", True, setup_for(external)))
    assert [call.status for call in reply.tool_calls] == [
        "ok",
        "ok",
        "unknown_tool",
        "bad_arguments",
        "bad_arguments",
        "bad_arguments",
        "unclosed",
    ]
    assert [call.span for call in reply.tool_calls[:2]] == [(1, 3), (0, 4)]
    assert [call.id for call in reply.tool_calls[:2]] == ["c1", None]
    assert reply.tool_calls[0].arguments == reply.tool_calls[1].arguments == '{"a": 1}'
    assert (reply.reasoning, reply.reasoning_open) == ("hm", True)


def test_certificate_covers_bridges_of_an_external_renderer(renderer: Renderer) -> None:
    certificate = certify(overridden(renderer, Chat))
    assert {(continuation.strategy, continuation.append_only) for continuation in certificate.continuations} == {
        ("local", "yes")
    }
    assert certificate.injection_safe
    assert "tools" in certificate.dropped


def test_certificate_forks_where_an_external_renderer_has_no_bridge(renderer: Renderer) -> None:
    external = overridden(renderer, Reluctant)
    certificate = certify(external)
    strategies = {
        continuation.name: continuation.strategy
        for continuation in certificate.continuations
        if "/" not in continuation.name
    }
    assert strategies["user"] == strategies["tool+user"] == "fork"
    assert strategies["tool"] == strategies["system"] == "local"
    user, unnamed = [grammar.NEXT], [grammar.NEXT, {"role": "assistant", "content": "x"}, grammar.NEXT]
    for new in (user, unnamed):
        assert choose(external, certificate, grammar.TURNS["content"], new, setup_for(external), [QUESTION]) == "fork"


def test_certificate_refuses_external_bridges_that_change_the_context(renderer: Renderer) -> None:
    user = certify(overridden(renderer, Short)).continuation("user")
    assert user is not None
    assert user.strategy == "refused"
    assert "does not keep the context" in user.reason


def test_a_certificate_shows_forged_control_tokens(renderer: Renderer) -> None:
    assert not certify(overridden(renderer, Forged)).injection_safe


@pytest.mark.parametrize("added", [[1.5], [-1], [2**40]])
def test_bridge_that_is_no_list_of_ids_is_refused(renderer: Renderer, added: list[Any]) -> None:
    class Odd(Chat):
        def bridge_to_next_turn(self, prompt: list[int], completion: list[int], new: Any, *, tools: Any = None) -> Any:
            return [*prompt, *completion, *added]

    with pytest.raises(InvariantViolation, match="expected a flat list of whole numbers"):
        bridged(renderer, Odd)


class Foreign(Chat):
    """Has ids of a larger vocabulary."""

    def render_ids(self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False) -> list[int]:
        return [10**6]


def test_an_id_that_the_tokenizer_lacks_is_an_error_of_the_object(renderer: Renderer) -> None:
    external = overridden(renderer, Foreign)
    with pytest.raises(InvariantViolation, match="returned the id 1000000"):
        external.render([QUESTION], setup_for(external, tools=()))
