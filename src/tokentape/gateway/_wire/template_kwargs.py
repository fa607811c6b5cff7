"""Check `chat_template_kwargs`, the variables that a request passes to the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokentape.errors import UnsupportedParameter
from tokentape.gateway._dialect import RequestContext
from tokentape.gateway._http import check_depth
from tokentape.gateway._wire.shared_fields import header_safe

FIELD = "chat_template_kwargs"

_INSTEAD = {
    **dict.fromkeys(("messages", "tools"), "send it as a field of the body"),
    **dict.fromkeys(("chat_template", "strftime_now", "tokenize"), "remove it"),
    **dict.fromkeys(
        ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
        "remove it: special tokens are the tokenizer's",
    ),
}
"""Variables that are not the caller's, and what to do instead."""

_FIXED = {"add_generation_prompt": True, "continue_final_message": False}
"""Variables that may only have this value."""


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raise `UnsupportedParameter` for a variable that callers can't set, and `InvalidRequest` for deep nesting."""
    check_depth(kwargs, FIELD)
    for name in kwargs:
        instead = _INSTEAD.get(name)
        if name in _FIXED and kwargs[name] is not _FIXED[name]:
            instead = f"only {str(_FIXED[name]).lower()} is supported: remove it"
        if instead is not None:
            raise UnsupportedParameter(f"{FIELD}.{name} can't be set; {instead}", FIELD)


def unread_kwargs(kwargs: Mapping[str, Any], context: RequestContext) -> tuple[str, ...]:
    """Return the variables that have no effect because the chat template does not read them."""
    unread = [name for name in kwargs if name not in _FIXED and not context.reads_kwarg(name)]
    return header_safe(FIELD, unread)
