"""`chat_template_kwargs`: those without effect are listed, those that are not the caller's are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from jinja2.meta import find_undeclared_variables

from tests.data import REAL
from tests.gateway.wire.test_client_defaults import Served
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate, parse_template
from tokentape.gateway._turns import Turns
from tokentape.store import SqliteStore

USER = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [USER]},
    "responses": {"input": "hi"},
    "messages": {"messages": [USER], "max_tokens": 8},
}


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def served(renderer: Renderer, store: SqliteStore, opened: ExitStack) -> Served:
    return Served(renderer, store, opened)


def send(served: Served, path: str, kwargs: dict[str, Any]) -> Any:
    body = {"model": "m", **BODIES[path], "chat_template_kwargs": kwargs}
    return httpx2.post(f"{served.url}/sessions/s/v1/{path}", json=body)


@pytest.mark.parametrize("path", BODIES)
def test_kwargs_that_the_template_does_not_read_are_listed(served: Served, path: str) -> None:
    answer = send(served, path, {"enable_thinkng": False, "ns": False, "a\nb": 1, "other": {"x": 1}})
    listed = ["chat_template_kwargs.enable_thinkng", "chat_template_kwargs.other"]
    assert answer.headers["x-tokentape-ignored-params"].replace(" ", "").split(",") == listed
    body = answer.json()
    assert body.get("tokentape", body.get("choices", [{}])[0].get("tokentape"))["ignored_params"] == listed


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "kwargs",
    [{"messages": []}, {"tools": []}, {"bos_token": "XX"}, {"add_generation_prompt": False}, {"strftime_now": "x"}],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_kwargs_that_are_not_the_callers_are_refused(served: Served, path: str, kwargs: dict[str, Any]) -> None:
    answer = send(served, path, kwargs)
    assert answer.status_code == 400
    assert f"chat_template_kwargs.{next(iter(kwargs))} can't be set" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
def test_fixed_kwargs_may_have_their_value(served: Served, path: str) -> None:
    answer = send(served, path, {"add_generation_prompt": True, "continue_final_message": False})
    assert answer.status_code == 200
    assert "x-tokentape-ignored-params" not in answer.headers


def test_a_templates_own_variables_may_be_kwargs() -> None:
    source = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}{{ messages }}"
    template = ChatTemplate(source, "{% if deep is true %}x{% endif %}")
    assert {"thinking", "deep", "messages"} <= template.variables
    assert "thinkng" not in template.variables


TEMPLATES = {
    "qwen3/templates/Qwen3.jinja": "enable_thinking",
    "deepseek_v31/templates/DeepSeek-V3.1.jinja": "thinking",
    "gpt_oss/templates/gpt-oss.jinja": "reasoning_effort",
}


@pytest.mark.real
@pytest.mark.parametrize(("path", "name"), TEMPLATES.items())
def test_the_kwargs_of_real_templates_are_known(path: str, name: str) -> None:
    variables = ChatTemplate((REAL / path).read_text()).variables
    assert name in variables
    assert name.replace("in", "im").replace("ef", "eff") not in variables


@pytest.mark.real
def test_no_variable_of_a_real_template_is_missed() -> None:
    """Compared with jinja2's own analysis, which leaves out those that the template sets."""
    paths = list(REAL.glob("*/templates/*.jinja"))
    assert len(paths) > 20
    for path in paths:
        template = ChatTemplate(path.read_text())
        assert find_undeclared_variables(parse_template(template.source)) <= template.variables


def test_a_renderer_of_another_kind_may_read_any_kwarg(served: Served) -> None:
    turns = Turns(served.engine, served.renderer, served.store)
    assert not turns.reads_kwarg("x")
    turns.renderer = SimpleNamespace(is_external=True)  # type: ignore[assignment]
    assert turns.reads_kwarg("x")


def test_an_empty_reply_may_come_back_without_content(served: Served) -> None:
    """Some templates fail on a message without the key. `exclude_none` leaves it out of a dumped reply."""
    served.engine.replies = ["<|im_end|>", "two<|im_end|>"]
    url = f"{served.url}/sessions/s/v1/chat/completions"
    reply = httpx2.post(url, json={"messages": [USER]}).json()["choices"][0]["message"]
    dumped = {name: value for name, value in reply.items() if value is not None}
    assert dumped == {"role": "assistant"}
    assert httpx2.post(url, json={"messages": [USER, dumped, USER]}).status_code == 200
    first, second = served.store.load_session("s").turns
    assert (second.parent, second.fork) == (first.seq, None)
