"""Real templates, as they are or changed a little, with what their tokenizers have to know of them.

There are those of the repository, and those beside it in `TOKENTAPE_TOKENIZERS` (default ../shared/tokenizers) and
../shared/trial, where they are there.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

import tests
import tokentape.demo
from tests.data import REAL
from tests.generator.compose import CONTROL, Template
from tests.generator.options import Case
from tests.generator.vocabularies import HTML

_REPOSITORY = Path(tests.__file__).parents[1]


@cache
def shipped() -> Mapping[str, Path]:
    """Templates of the repository by name: the same on every machine."""
    demo = Path(tokentape.demo.__file__).parent / "model" / "chat_template.jinja"
    return {"demo": demo, **_named(_REPOSITORY / "tests" / "chat" / "data" / "models", "")}


@cache
def beside() -> Mapping[str, Path]:
    """Templates outside the repository by name, if present."""
    trial = sorted((REAL.parent / "trial" / "templates").glob("*.jinja"))
    return {**_named(REAL, "real/"), **{f"trial/{path.stem}": path for path in trial}}


@cache
def bases() -> Mapping[str, Path]:
    """All templates by name."""
    return {**shipped(), **beside()}


def _named(root: Path, prefix: str) -> dict[str, Path]:
    return {f"{prefix}{path.parents[1].name}/{path.stem}": path for path in sorted(root.glob("*/templates/*.jinja"))}


@cache
def _family(folder: Path) -> tuple[dict[str, bool], dict[str, str]]:
    """The added tokens of a real tokenizer with their `special` flags, and its bos and eos token."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}, {}
    added = {token["content"]: token["special"] for token in json.loads(path.read_bytes())["added_tokens"]}
    config = json.loads((path.parent / "tokenizer_config.json").read_bytes())
    named = {key: config.get(key) for key in ("bos_token", "eos_token")}
    return added, {key: value["content"] if isinstance(value, dict) else value for key, value in named.items() if value}


_ANY_TAG = re.compile(
    CONTROL.pattern + r"|</?[A-Z][A-Z_0-9]{2,30}>|<\|[^<>\s|]{1,30}>|<[a-z_]{2,30}\|>|\[\|[a-z]{2,20}\|\]"
)


def as_template(source: str, eos: str | None = None, controls: Sequence[str] = ()) -> Template:
    """A template without a tokenizer: what looks like a control token in it is one, as are `controls`.

    The first after a turn ends it.
    """
    found = [*controls, *(token for token in _ANY_TAG.findall(source) if token not in HTML)]
    end = _ANY_TAG.findall(_rendered(source).rpartition("hello")[2])
    eos = eos or (end[0] if end else "</s>")
    return Template(source, tuple(dict.fromkeys([*found, "<s>", eos])), "<s>", eos, (), {})


def real_template(case: Case) -> Template:
    """The real template that a case names, with the case's mutations."""
    path = bases()[case.base]
    source = path.read_text(encoding="utf-8")
    added, named = _family(path.parent if case.base == "demo" else path.parents[1])
    found = dict.fromkeys([*(token for token in added if token in source), *CONTROL.findall(source)])
    eos = named.get("eos_token") or _last_token(source)
    bos = named.get("bos_token", "<s>")
    for name in case.mutations:
        changed = mutate(source, name, case.random(f"mutation {name}"))
        if "hello" in _rendered(changed):
            source = changed
    keyword = {"none": {}, "thinking_off": {"enable_thinking": False}, "thinking_on": {"enable_thinking": True}}
    controls = tuple(dict.fromkeys([*found, bos, eos]))
    plain = tuple(token for token, special in added.items() if not special)
    return Template(source, controls, bos, eos, (), keyword[case.options["keyword"]], plain)


def _rendered(source: str) -> str:
    """A question and an answer as a template renders them; empty if it does not."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    try:
        texts, _ = render_jinja_template([messages], chat_template=source, bos_token="<s>", eos_token="</s>")
    except Exception:  # a template may raise anything
        return ""
    return str(texts[0])


def _last_token(source: str) -> str:
    """The token that a conversation ends with: what a model without a configuration would stop at."""
    found = CONTROL.findall(_rendered(source).rpartition("hello")[2])
    return str(found[0]) if found else "</s>"


def mutate(source: str, name: str, rng: random.Random) -> str:
    """`source` with one change of this kind, or unchanged if there is no place for one."""
    return MUTATIONS[name](source, rng)


def _replace_random(source: str, pattern: str, by: Callable[[re.Match[str]], str], rng: random.Random) -> str:
    places = list(re.finditer(pattern, source))
    if not places:
        return source
    at = places[int(rng.random() * len(places))]
    return source[: at.start()] + by(at) + source[at.end() :]


def _replacing(pattern: str, by: Callable[[re.Match[str]], str]) -> Callable[[str, random.Random], str]:
    return lambda source, rng: _replace_random(source, pattern, by, rng)


def _swap_markers(source: str, rng: random.Random) -> str:
    markers = list(dict.fromkeys(CONTROL.findall(source)))
    if len(markers) < 2:
        return source
    left, right = rng.sample(markers, 2)
    return _replace_random(source, re.escape(left), lambda _: right, rng)


_OUTPUT = r"\{\{-?\s*'[^'{}]+'\s*-?\}\}"
_IF = r"(\{%-?\s*(?:el)?if\s+)([^%]+?)(\s*-?%\})"
_LOOP = r"\{%-?\s*for\s+\w+\s+in\s+(?:loop_)?messages[^%]*%\}"
_CALL_LOOP = r"\{%-?\s*for\s+\w+\s+in\s+\w+(?:\.tool_calls|\['tool_calls'\])[^%]*%\}"

MUTATIONS: Mapping[str, Callable[[str, random.Random], str]] = {
    "drop_trim": _replacing(r"\s*\|\s*trim|\.l?r?strip\((?:'[^']*')?\)", lambda _: ""),
    "add_trim": _replacing(
        r"\bmessage\.content\b(?!\s*[.|\[])|\bmessage\['content'\](?!\s*[.|\[])", lambda m: m[0] + " | trim"
    ),
    "swap_markers": _swap_markers,
    "negate": _replacing(_IF, lambda m: f"{m[1]}not ({m[2]}){m[3]}"),
    "always": _replacing(_IF, lambda m: f"{m[1]}true or ({m[2]}){m[3]}"),
    "never": _replacing(_IF, lambda m: f"{m[1]}false and ({m[2]}){m[3]}"),
    "first_for_last": _replacing(
        r"loop\.last|loop\.first", lambda m: "loop.first" if m[0] == "loop.last" else "loop.last"
    ),
    "drop_text": _replacing(_OUTPUT, lambda _: ""),
    "double_text": _replacing(_OUTPUT, lambda m: m[0] * 2),
    "toggle_dash": _replacing(r"\{%-", lambda _: "{%"),
    "fewer_newlines": _replacing(r"\\n", lambda _: ""),
    "more_newlines": _replacing(r"\\n", lambda _: "\\n\\n"),
    "number_messages": _replacing(_LOOP, lambda m: m[0] + "{{ '#' ~ loop.index }}"),
    "number_calls": _replacing(_CALL_LOOP, lambda m: m[0] + "{{ loop.index0 }}"),
    "switch_system": lambda source, rng: source + _SWITCH.replace("WHERE", "messages[0].content"),
    "switch_last": lambda source, rng: source + _SWITCH.replace("WHERE", "messages[-1].content"),
    "count": lambda source, rng: (
        source + "{% if add_generation_prompt and messages | length > 4 %}{{ 'many ' }}{% endif %}"
    ),
    "tools_last": lambda source, rng: (
        source + "{% if tools and add_generation_prompt %}{{ tools | tojson }}{% endif %}"
    ),
}
"""By name, what makes one change at a random place."""

_SWITCH = "{% if add_generation_prompt and '/fast' in (WHERE or '') %}{{ '<fast>' }}{% endif %}"
