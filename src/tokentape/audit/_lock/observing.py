"""Encode a lock's inputs with a model folder, a tokenizer object or a server, to compare the ids with the lock.

Whatever can't be observed, such as the parts of a server's tokenizer, is None or listed in `not_compared`. Reports name
it and do not treat it as unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tokentape.audit._lock.lockfile import (
    Components,
    Lock,
    LockGolden,
    certified,
    components_of,
    golden_ids,
    spec_parts,
    versions,
)
from tokentape.audit._skew.backends.base import with_text_arguments
from tokentape.audit._skew.backends.server import introduced
from tokentape.chat._certificate_cache import load_or_certify
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate
from tokentape.engines._http import HttpClient
from tokentape.engines._tokenizing import server_chat_ids, server_text_ids
from tokentape.errors import InvalidRequest, NothingToMeasure

_NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")


@dataclass(frozen=True, slots=True)
class Observed:
    """Observations to compare with a lock."""

    name: str
    """The path of a folder, or a description for reports."""
    ids: Mapping[str, tuple[int, ...] | None]
    """The ids of each golden input that could be tried, by its name; None if the template refuses it."""
    versions: Mapping[str, str]
    components: Components | None = None
    certificate: Mapping[str, Any] | None = None
    source: Callable[[], str | bytes] | None = None
    """Returns the content of tokenizer.json; None if there is no such file."""
    not_compared: Sequence[str] = ()
    """Descriptions of what could not be observed, each with the reason."""


def observe_folder(
    lock: Lock, folder: str | Path, chat_template: str | Path | None, template_kwargs: Mapping[str, Any]
) -> Observed:
    """Observe the tokenizer and template of a model folder. Raises `TokenizerUnusable` and `TemplateRefused`."""
    renderer = Renderer.load(folder, chat_template)
    return Observed(
        name=str(folder),
        ids={golden.name: golden_ids(renderer, template_kwargs, golden) for golden in lock.goldens},
        versions=versions(),
        components=components_of(renderer, Path(folder)),
        certificate=certified(load_or_certify(renderer, template_kwargs)),
        source=(Path(folder) / "tokenizer.json").read_bytes,
    )


def observe_live(lock: Lock, live: Any, template_kwargs: Mapping[str, Any]) -> Observed:
    """Observe a transformers tokenizer, or a processor that has one, by calling it as trainers do.

    Raises `InvalidRequest` for an object that is neither.
    """
    tokenizer = getattr(live, "tokenizer", live)
    if not (callable(tokenizer) and hasattr(tokenizer, "apply_chat_template")):
        raise InvalidRequest(
            f"a {type(live).__name__} can't be checked; expected a model folder, a transformers tokenizer or a "
            "processor that has one"
        )
    template = getattr(live, "chat_template", None) or tokenizer.chat_template
    variants = template if isinstance(template, Mapping) else {"default": template or ""}
    not_compared = [] if template is not None else ["conversations: the tokenizer has no chat template"]
    found: dict[str, tuple[int, ...] | None] = {}
    for golden in lock.goldens:
        if not golden.messages:
            found[golden.name] = _ints(tokenizer(golden.text, add_special_tokens=golden.special)["input_ids"])
        elif template is not None:
            source = variants["tool_use" if golden.tools and "tool_use" in variants else "default"]
            found[golden.name] = _live_chat_ids(tokenizer, source, lock.date, template_kwargs, golden)
    source_of = getattr(getattr(tokenizer, "backend_tokenizer", None), "to_str", None)
    components = None
    if source_of is None:
        not_compared.append("parts: the tokenizer is not one of the `tokenizers` library")
    else:
        compiled = ChatTemplate(variants["default"], variants.get("tool_use"))
        named = {key: getattr(tokenizer, key, None) for key in lock.components.special_tokens}
        components = Components(
            files={},
            **spec_parts(json.loads(source_of())),
            special_tokens={key: str(value) for key, value in named.items() if value is not None},
            eos_ids=lock.components.eos_ids,  # a tokenizer in memory has none
            template=tuple(compiled.source.splitlines()),
            template_sha256=compiled.sha256,
        )
    name = f"the {type(tokenizer).__name__} given"
    return Observed(name, found, versions(), components, source=source_of, not_compared=not_compared)


async def observe_server(
    lock: Lock,
    url: str,
    *,
    kind: str | None = None,
    model: str | None = None,
    api_key: str | None = None,
) -> Observed:
    """Observe the ids that a running server returns.

    `kind` is vllm, sglang, llamacpp or gateway. Kind and model are detected if not given.

    Raises `InvalidRequest` if the kind can't be detected, `EngineError` or a subclass if the server does not answer.
    """
    http = HttpClient(url, api_key=api_key)
    found: dict[str, tuple[int, ...] | None] = {}
    unknown: dict[str, list[str]] = {}
    try:
        if kind is None or model is None:
            kind, first = await introduced(http, kind)
            model = model or first
        for golden in lock.goldens:
            why, ids = await _server_ids(kind, http, model, lock, golden)
            if why:
                unknown.setdefault(why, []).append(golden.name)
            else:
                found[golden.name] = ids
    finally:
        await http.close()
    if not found:
        raise NothingToMeasure(f"the server at {url} returns no ids for texts or conversations: nothing was compared")
    not_compared = ["parts, template and certificate: a server returns only ids"]
    for why, names in unknown.items():
        some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        not_compared.append(f"{len(names)} inputs ({some}): {why}")
    return Observed(f"the {kind} server", found, versions={}, not_compared=not_compared)


async def _server_ids(
    kind: str, http: HttpClient, model: str, lock: Lock, golden: LockGolden
) -> tuple[str, tuple[int, ...] | None]:
    """Return the reason why a golden input can't be compared, or an empty string, and its ids."""
    if not golden.messages:
        ids = await server_text_ids(kind, http, model, golden.text, special=golden.special, controls=True)
        return "" if ids is not None else "the server has no endpoint for texts", _ints(ids)
    if lock.certificate.get("date printed"):
        return "the template prints the date, and a server prints its own", None
    if golden.ids is None:
        return "the template refuses them", None
    ids = await server_chat_ids(kind, http, model, golden.messages, golden.tools, template_kwargs=lock.template_kwargs)
    return "" if ids is not None else "the server does not render them", _ints(ids)


def _live_chat_ids(
    tokenizer: Any, template: str, date: str, template_kwargs: Mapping[str, Any], golden: LockGolden
) -> tuple[int, ...] | None:
    # transformers gives templates its own clock.
    shown = datetime.fromisoformat(date).strftime
    dated = _NOW.sub(lambda match: json.dumps(shown(match[2])), template)
    asked = {"chat_template": dated, "add_generation_prompt": True, "tokenize": True, **template_kwargs}
    # `Renderer` passes tool arguments in the form that the template accepts. A trainer would do that too.
    for messages in (golden.messages, map(with_text_arguments, golden.messages)):
        try:
            rendered = tokenizer.apply_chat_template(list(messages), tools=list(golden.tools) or None, **asked)
        except Exception:  # a template raises any error
            continue
        # transformers 4 returns a list, 5 a mapping.
        return _ints(rendered if isinstance(rendered, list) else rendered["input_ids"])
    return None


def _ints(ids: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if ids is None else tuple(map(int, ids))
