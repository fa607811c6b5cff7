"""What a tokenizer does now with a lock's inputs: one in a folder, one that a trainer holds in memory, a server's.

Each way gives the same `Observed`. What a way can't tell, for example the parts of a server's tokenizer, is None or in
`not_compared`: it is said, never taken for unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from tokentape.audit.lock.components import Components, components_of, spec_parts
from tokentape.audit.lock.goldens import LockGolden, chat_ids, text_ids, with_text_arguments
from tokentape.audit.lock.lockfile import LIBRARIES, Lock, certified, versions
from tokentape.chat.certificate_cache import load_or_certify
from tokentape.chat.renderer import Renderer
from tokentape.chat.template import ChatTemplate
from tokentape.engines.http import HttpClient
from tokentape.engines.tokenizing import server_chat_ids, server_text_ids
from tokentape.errors import EngineContractError, InvalidRequest

_NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")

KINDS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "tokentape": "gateway"}
"""What servers call themselves in `/v1/models`, and how they are asked."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What was found to compare a lock with."""

    name: str
    """Of what was asked, for people."""
    ids: Mapping[str, tuple[int, ...] | None]
    """By name of the golden, of those that could be asked for; None where the template refuses."""
    versions: Mapping[str, str]
    """Of the libraries it was asked with; empty for a server."""
    components: Components | None = None
    certificate: Mapping[str, Any] | None = None
    not_compared: tuple[str, ...] = ()
    """What could not be asked, and why."""


def observe_folder(
    lock: Lock, folder: str | Path, chat_template: str | Path | None, template_kwargs: Mapping[str, Any]
) -> Observed:
    """What the tokenizer and template of a model folder do. Raises `TokenizerUnusable` and `TemplateRefused`."""
    folder = Path(folder)
    renderer = Renderer.load(folder, chat_template)
    source = (folder / "tokenizer.json").read_bytes()
    found = {
        golden.name: _tuple(
            chat_ids(renderer, template_kwargs, golden) if golden.messages else text_ids(renderer.tokenizer, golden)
        )
        for golden in lock.goldens
    }
    return Observed(
        name=str(folder),
        ids=found,
        versions=dict(versions(LIBRARIES)),
        components=components_of(renderer.tokenizer, source, renderer.template, folder),
        certificate=certified(load_or_certify(renderer, template_kwargs)),
    )


def observe_live(lock: Lock, live: Any, template_kwargs: Mapping[str, Any]) -> Observed:
    """What a transformers tokenizer, or a processor that holds one, does as a trainer calls it.

    Raises `InvalidRequest` for an object that is neither.
    """
    tokenizer = getattr(live, "tokenizer", live)
    if not (callable(tokenizer) and hasattr(tokenizer, "apply_chat_template")):
        raise InvalidRequest(
            f"a {type(live).__name__} can't be checked; expected a model folder, a transformers tokenizer or a "
            "processor that has one"
        )
    template = getattr(live, "chat_template", None) or tokenizer.chat_template
    not_compared = []
    found: dict[str, tuple[int, ...] | None] = {}
    for golden in lock.goldens:
        if not golden.messages:
            found[golden.name] = _tuple(tokenizer(golden.text, add_special_tokens=golden.special)["input_ids"])
        elif template is not None:
            found[golden.name] = _tuple(_live_chat_ids(tokenizer, template, lock.date, template_kwargs, golden))
    if template is None:
        not_compared.append("conversations: the tokenizer has no chat template")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    components = None
    if backend is None or not hasattr(backend, "to_str"):
        not_compared.append("parts: it is not one of the `tokenizers` library")
    else:
        components = _live_components(lock, tokenizer, backend.to_str(), template)
    return Observed(
        name=f"the {type(tokenizer).__name__} given",
        ids=found,
        versions=dict(versions(LIBRARIES)),
        components=components,
        not_compared=tuple(not_compared),
    )


async def observe_server(
    lock: Lock,
    url: str,
    *,
    kind: str | None = None,
    model: str | None = None,
    api_key: str | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Observed:
    """The ids that a running server gives the inputs of a lock, asked through its own endpoints.

    `kind` is one of vllm, sglang, llamacpp and gateway; it is found out if not given, and so is the model.

    Raises `InvalidRequest` if its kind is not known, `EngineError` and kinds if it can't be asked.
    """
    http = HttpClient(url, api_key=api_key)
    try:
        if kind is None or model is None:
            said, first = await _introduced(http)
            kind, model = kind or said, model or first
        found: dict[str, tuple[int, ...] | None] = {}
        untold: dict[str, list[str]] = {}
        for golden in lock.goldens:
            progress(golden.name)
            why, ids = await _server_ids(kind, http, model, lock, golden)
            if why:
                untold.setdefault(why, []).append(golden.name)
            else:
                found[golden.name] = _tuple(ids)
    finally:
        await http.close()
    if not found:
        raise InvalidRequest(f"the server at {url} does not tell how it tokenizes: no golden input was compared")
    not_compared = ["parts, template and certificate: a server shows its ids only"]
    not_compared += [f"{len(names)} inputs ({_some(names)}): {why}" for why, names in untold.items()]
    return Observed(f"the {kind} server", found, versions={}, not_compared=tuple(not_compared))


async def _server_ids(
    kind: str, http: HttpClient, model: str, lock: Lock, golden: LockGolden
) -> tuple[str, Sequence[int] | None]:
    """Why a golden is not compared, empty if it is, and its ids."""
    if not golden.messages:
        ids = await server_text_ids(kind, http, model, golden.text, special=golden.special, controls=True)
        return ("the server has no endpoint for it", None) if ids is None else ("", ids)
    if lock.certificate.get("date printed"):
        return "the template prints the date, and a server prints its own", None
    if golden.ids is None:
        return "the template refuses them", None
    ids = await server_chat_ids(kind, http, model, golden.messages, golden.tools, template_kwargs=lock.template_kwargs)
    return ("the server does not render them", None) if ids is None else ("", ids)


class _Card(msgspec.Struct):
    id: str
    owned_by: str = ""


class _Models(msgspec.Struct):
    data: list[_Card]


async def _introduced(http: HttpClient) -> tuple[str, str]:
    """What kind of server it says it is, and the first model it serves."""
    try:
        cards = msgspec.json.decode(await http.get("/v1/models"), type=_Models).data
    except msgspec.MsgspecError:
        raise EngineContractError("the server's answer at /v1/models is no list of models") from None
    if not cards or cards[0].owned_by not in KINDS:
        says = repr(cards[0].owned_by) if cards else "nothing"
        raise InvalidRequest(
            f"the server says at /v1/models that it is {says}, expected one of {', '.join(KINDS)}; name its kind"
        )
    return KINDS[cards[0].owned_by], cards[0].id


def _live_chat_ids(
    tokenizer: Any, template: Any, date: str, template_kwargs: Mapping[str, Any], golden: LockGolden
) -> list[int] | None:
    if isinstance(template, Mapping):
        template = template["tool_use" if golden.tools and "tool_use" in template else "default"]
    # Our renderer gives a template the arguments of calls in the shape that it takes; a trainer has to.
    for messages in (golden.messages, tuple(map(with_text_arguments, golden.messages))):
        try:
            rendered = tokenizer.apply_chat_template(
                list(messages),
                tools=list(golden.tools) or None,
                chat_template=_with_date(template, date),
                add_generation_prompt=True,
                tokenize=True,
                **template_kwargs,
            )
        except Exception:  # a template raises what it likes
            continue
        # transformers 4 returns a list, 5 a mapping.
        return list(rendered if isinstance(rendered, list) else rendered["input_ids"])
    return None


def _with_date(template: str, date: str) -> str:
    """The template with a frozen clock: transformers gives templates its own."""
    shown = datetime.fromisoformat(date).strftime
    return _NOW.sub(lambda match: json.dumps(shown(match[2])), template)


def _live_components(lock: Lock, tokenizer: Any, source: str, template: Any) -> Components:
    """The parts of a tokenizer in memory; what it does not know of a folder is as the lock has it."""
    if isinstance(template, Mapping):
        compiled = ChatTemplate(template["default"], template.get("tool_use"))
    else:
        compiled = ChatTemplate(template or "")
    named = {key: getattr(tokenizer, key, None) for key in lock.components.special_tokens}
    spec = spec_parts(source)
    return Components(
        files={},
        **spec,
        special_tokens={key: str(value) for key, value in named.items() if value is not None},
        eos_ids=lock.components.eos_ids,
        template=tuple(compiled.source.splitlines()),
        template_sha256=compiled.sha256,
    )


def _tuple(ids: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if ids is None else tuple(map(int, ids))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
