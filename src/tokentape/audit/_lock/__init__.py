"""Locks: record a model's tokenization in a lockfile, and check it wherever the model is used.

`tokentape lock MODEL -o tokentape.lock` writes a lockfile to commit. `tokentape check tokentape.lock MODEL` checks it
in CI, and `tokentape.check("tokentape.lock", tokenizer)` at the start of a training script.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokentape.audit._lock.comparing import LockChange, LockReport, compare
from tokentape.audit._lock.lockfile import Lock, make_lock, read_lock, write_lock
from tokentape.audit._lock.observing import observe_folder, observe_live, observe_server
from tokentape.errors import InvalidRequest, TokenizationChanged

__all__ = [
    "Lock",
    "LockChange",
    "LockReport",
    "check",
    "examine",
    "examine_server",
    "make_lock",
    "read_lock",
    "write_lock",
]


def check(
    lockfile: str | Path,
    tokenizer: Any = None,
    *,
    engine: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    chat_template: str | Path | None = None,
    strict: bool = False,
) -> None:
    """Raise `TokenizationChanged` if a tokenizer or a server no longer does what a lockfile recorded.

        tokentape.check("tokentape.lock", tokenizer)              # a transformers tokenizer or a processor
        tokentape.check("tokentape.lock", "path/to/model")
        tokentape.check("tokentape.lock", engine="http://127.0.0.1:8000")

    Args:
        lockfile: a file written by `tokentape lock`.
        tokenizer: a model folder, or a tokenizer or processor object, as trainers take it.
        engine: the address of a vLLM, SGLang or llama.cpp server, or of a gateway, to compare its ids too.
        template_kwargs: the template kwargs of the run; by default those of the lock.
        chat_template: a template file to use instead of the folder's.
        strict: True to fail also if only the version of a library, or the bytes of a file, changed.

    Raises:
        TokenizationChanged: something changed. The message names the part, the first input with other ids, the ids
            expected and found, and a likely cause. The attribute `report` has them as fields.
        InvalidRequest: the lockfile can't be read, or neither `tokenizer` nor `engine` is given.
        TokenizerUnusable, EngineError: the tokenizer can't be loaded, or the server does not answer.

    """
    if tokenizer is None and engine is None:
        raise InvalidRequest(
            "there is nothing to compare: pass a model folder, a tokenizer or the address of an engine"
        )
    lock = read_lock(lockfile)
    if tokenizer is not None:
        _raise_if_changed(examine(lock, tokenizer, template_kwargs, chat_template, strict=strict), lockfile)
    if engine is not None:
        _raise_if_changed(examine_server(lock, engine, template_kwargs, strict=strict), lockfile)


def examine(
    lock: Lock,
    tokenizer: Any,
    template_kwargs: Mapping[str, Any] | None = None,
    chat_template: str | Path | None = None,
    *,
    strict: bool = False,
) -> LockReport:
    """Compare a model folder or a tokenizer object with a lock. Raises like `check`, except `TokenizationChanged`."""
    kwargs = lock.template_kwargs if template_kwargs is None else template_kwargs
    if isinstance(tokenizer, str | Path):
        observed = observe_folder(lock, tokenizer, chat_template, kwargs)
    else:
        observed = observe_live(lock, tokenizer, kwargs)
    return compare(lock, observed, kwargs, strict=strict)


def examine_server(
    lock: Lock,
    url: str,
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    strict: bool = False,
    **server: str | None,
) -> LockReport:
    """Compare the ids of a running server with a lock. `server` has further arguments of `observe_server`."""
    kwargs = lock.template_kwargs if template_kwargs is None else template_kwargs
    return compare(lock, asyncio.run(observe_server(lock, url, **server)), kwargs, strict=strict)


def _raise_if_changed(report: LockReport, lockfile: str | Path) -> None:
    if not report.ok:
        raise TokenizationChanged(f"{lockfile}: {report}", report)
