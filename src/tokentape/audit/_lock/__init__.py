"""Locks: record a model's tokenization in a lockfile, and check it wherever the model is used.

`tokentape lock MODEL -o tokentape.lock` writes a lockfile to commit. `tokentape check tokentape.lock MODEL` checks it
in CI, and `tokentape.check("tokentape.lock", tokenizer)` at the start of a training script. What can't be observed,
such as the parts of a server's tokenizer, is reported as not compared, never as unchanged.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from datetime import datetime
from inspect import signature
from pathlib import Path
from typing import Any

from tokentape.audit._lock import lockfile as _lockfile
from tokentape.audit._lock.comparing import LockChange, LockReport, Observed, compare
from tokentape.audit._lock.lockfile import Components, Lock, LockGolden, make_lock, read_lock, write_lock
from tokentape.audit._skew.backends.server import introduced
from tokentape.chat._certificate_cache import load_or_certify
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate
from tokentape.chat._tokenizer_files import named_special_tokens
from tokentape.engines._http import HttpClient
from tokentape.engines._tokenizing import server_chat_ids, server_text_ids, with_text_arguments
from tokentape.errors import InvalidRequest, NothingToMeasure, TokenizationChanged

__all__ = [
    "Lock", "LockChange", "LockReport", "check", "examine", "examine_server", "make_lock", "read_lock",
    "write_lock",
]  # fmt: skip


_NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")


def check(
    lockfile: str | Path,
    tokenizer: Any = None,
    *,
    engine: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    chat_template: str | Path | None = None,
    strict: bool = False,
) -> None:
    """Raise `TokenizationChanged` if a tokenizer or a server no longer matches a lockfile.

        tokentape.check("tokentape.lock", tokenizer)              # a transformers tokenizer or a processor
        tokentape.check("tokentape.lock", "path/to/model")
        tokentape.check("tokentape.lock", engine="http://127.0.0.1:8000")

    Args:
        lockfile: a file written by `tokentape lock`.
        tokenizer: a model folder, or a transformers tokenizer or processor, as passed to trainers.
        engine: the URL of a vLLM, SGLang or llama.cpp server, or of a gateway, whose ids are compared too.
        template_kwargs: the run's template kwargs; by default the lock's.
        chat_template: a template file to use instead of the folder's.
        strict: True to fail also if only a library's version or a file's bytes changed.

    Raises:
        TokenizationChanged: something changed. The message names the part, the first input whose ids differ, the
            expected and found ids, and a likely cause. The attribute `report` has them as fields.
        InvalidRequest: the lockfile can't be read, or neither `tokenizer` nor `engine` is given.
        TokenizerUnusable, EngineError: the tokenizer can't be loaded, or the server does not answer.

    """
    if tokenizer is None and engine is None:
        raise InvalidRequest("there is nothing to compare: pass a model folder, a tokenizer or the URL of an engine")
    lock = read_lock(lockfile)
    if tokenizer is not None:
        _raise_if_changed(examine(lock, tokenizer, template_kwargs, chat_template, strict=strict), lockfile)
    if engine is not None:
        _raise_if_changed(examine_server(lock, engine, template_kwargs, strict=strict), lockfile)


def _raise_if_changed(report: LockReport, lockfile: str | Path) -> None:
    if not report.ok:
        raise TokenizationChanged(f"{lockfile}: {report}", report)


def examine(
    lock: Lock,
    tokenizer: Any,
    template_kwargs: Mapping[str, Any] | None = None,
    chat_template: str | Path | None = None,
    *,
    strict: bool = False,
) -> LockReport:
    """Compare a model folder or a tokenizer object with a lock. A difference raises no `TokenizationChanged`."""
    kwargs = lock.template_kwargs if template_kwargs is None else template_kwargs
    if not isinstance(tokenizer, str | Path):
        return compare(lock, _observe_live(lock, tokenizer, kwargs), kwargs, strict=strict)
    renderer = Renderer.load(tokenizer, chat_template)
    observed = Observed(
        name=str(tokenizer),
        ids={golden.name: _lockfile.golden_ids(renderer, kwargs, golden) for golden in lock.goldens},
        versions=_lockfile.versions(),
        components=_lockfile.components_of(renderer, Path(tokenizer)),
        certificate=_lockfile.certified(load_or_certify(renderer, kwargs)),
        source=(Path(tokenizer) / "tokenizer.json").read_bytes,
    )
    return compare(lock, observed, kwargs, strict=strict)


def examine_server(
    lock: Lock,
    url: str,
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    strict: bool = False,
    **server: str | None,
) -> LockReport:
    """Compare a running server's ids with a lock. `server` may contain its `kind`, `model` and `api_key`."""
    kwargs = lock.template_kwargs if template_kwargs is None else template_kwargs
    return compare(lock, asyncio.run(observe_server(lock, url, **server)), kwargs, strict=strict)


def _observe_live(lock: Lock, live: Any, template_kwargs: Mapping[str, Any]) -> Observed:
    """Observe a transformers tokenizer, or a processor that has one, by calling it as trainers do."""
    tokenizer = getattr(live, "tokenizer", live)
    if not (callable(tokenizer) and hasattr(tokenizer, "apply_chat_template")):
        raise InvalidRequest(
            f"a {type(live).__name__} can't be checked; expected a model folder, a transformers tokenizer or a "
            "processor that has one"
        )
    template = getattr(live, "chat_template", None) or tokenizer.chat_template
    variants = template if isinstance(template, Mapping) else {"default": template or ""}
    not_compared = [] if template is not None else ["conversations: the tokenizer has no chat template"]
    observed_ids: dict[str, tuple[int, ...] | None] = {}
    for golden in lock.goldens:
        if not golden.messages:
            observed_ids[golden.name] = tuple(tokenizer(golden.text, add_special_tokens=golden.special)["input_ids"])
        elif template is not None:
            source = variants["tool_use" if golden.tools and "tool_use" in variants else "default"]
            observed_ids[golden.name] = _live_chat_ids(tokenizer, source, lock.date, template_kwargs, golden)
    source_of = getattr(getattr(tokenizer, "backend_tokenizer", None), "to_str", None)
    components = None
    if source_of is None:
        not_compared.append("parts: the tokenizer is not one of the `tokenizers` library")
    else:
        compiled = ChatTemplate(variants["default"], variants.get("tool_use"))
        locked = lock.components.special_tokens
        special_tokens = {key: getattr(tokenizer, key, None) for key in (*locked, *_set_by_code(lock, tokenizer))}
        components = Components(
            files={},
            **_lockfile.spec_parts(json.loads(source_of())),
            special_tokens={key: str(value) for key, value in special_tokens.items() if value is not None},
            eos_ids=lock.components.eos_ids,  # a tokenizer in memory has no eos ids to compare
            template=tuple(compiled.source.splitlines()),
            template_sha256=compiled.sha256,
        )
    name = f"the {type(tokenizer).__name__} given"
    return Observed(name, observed_ids, _lockfile.versions(), components, source=source_of, not_compared=not_compared)


def _set_by_code(lock: Lock, tokenizer: Any) -> list[str]:
    """Return the names of special tokens that the tokenizer has, but neither the locked files nor its class sets."""
    by_map = named_special_tokens((lock.components.loading or {}).get("special_tokens_map.json", {}))
    parameters = signature(type(tokenizer).__init__).parameters
    by_class = {name: parameter.default for name, parameter in parameters.items()}
    return [
        name
        for name, token in getattr(tokenizer, "special_tokens_map", {}).items()
        if name not in lock.components.special_tokens
        and not isinstance(token, list)
        and str(token) not in (by_map.get(name), str(by_class.get(name)))
    ]


async def observe_server(
    lock: Lock, url: str, *, kind: str | None = None, model: str | None = None, api_key: str | None = None
) -> Observed:
    """Observe the ids that a running server of `kind` returns for `model`. Both are detected if not passed."""
    http = HttpClient(url, api_key=api_key)
    observed_ids: dict[str, tuple[int, ...] | None] = {}
    unknown: dict[str, list[str]] = {}
    try:
        if kind is None or model is None:
            kind, first = await introduced(http, kind)
            model = model or first
        for golden in lock.goldens:
            ids = None
            if not golden.messages:
                why = "the server has no tokenize endpoint"
                ids = await server_text_ids(kind, http, model, golden.text, special=golden.special, controls=True)
            elif lock.certificate.get("date printed"):
                why = "the template prints the date, which a server takes from its clock"
            elif golden.ids is None:
                why = "the template refuses them"
            else:
                why, chat = "the server does not render them", (golden.messages, golden.tools)
                ids = await server_chat_ids(kind, http, model, *chat, template_kwargs=lock.template_kwargs)
            if ids is None:
                unknown.setdefault(why, []).append(golden.name)
            else:
                observed_ids[golden.name] = tuple(ids)
    finally:
        await http.close()
    if not observed_ids:
        raise NothingToMeasure(f"the server at {url} returns no ids for texts or conversations: nothing to compare")
    not_compared = ["parts, template and certificate: a server returns only ids"]
    for why, names in unknown.items():
        some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        not_compared.append(f"{len(names)} inputs ({some}): {why}")
    return Observed(f"the {kind} server", observed_ids, versions={}, not_compared=not_compared)


def _live_chat_ids(
    tokenizer: Any, template: str, date: str, template_kwargs: Mapping[str, Any], golden: LockGolden
) -> tuple[int, ...] | None:
    # transformers passes its own clock to templates.
    shown = datetime.fromisoformat(date).strftime
    dated = _NOW.sub(lambda match: json.dumps(shown(match[2])), template)
    options = {"chat_template": dated, "add_generation_prompt": True, "tokenize": True, **template_kwargs}
    # `Renderer` passes tool arguments in the form that the template accepts. A trainer would do that too.
    for messages in (golden.messages, map(with_text_arguments, golden.messages)):
        try:
            rendered = tokenizer.apply_chat_template(list(messages), tools=list(golden.tools) or None, **options)
        except Exception:  # a template raises any error
            continue
        # transformers 4 returns a list, 5 a mapping.
        return tuple(rendered if isinstance(rendered, list) else rendered["input_ids"])
    return None
