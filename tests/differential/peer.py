"""What `renderers` and TRL append after a sampled turn, run in a separate environment.

Run by `test_bridges.py` with the Python named in TOKENTAPE_RENDERERS_PYTHON, never imported. Reads one JSON object from
standard input, {"cases": [...]}, and writes the answers, in order, to the file that its only argument names. A case has

    peer              `renderers`, `trl`, or `template`: transformers' own rendering of the whole conversation
    tokenizer         path of a tokenizer.json
    special_tokens    bos_token, eos_token, ...
    template          source of the chat template
    config            for `renderers`: fields of its typed configuration, `name` included
    messages          for `template`: the conversation, new messages included
    prompt_ids, completion_ids, new_messages, tools

and an answer `ids`, what the peer appends (`template`: all ids; null if it declines or fails), `kept`, whether all ids
before stayed as they were, and `note`, why it declined or what it did first.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any


@cache
def load_tokenizer(path: str, special_tokens: str, template: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=path, chat_template=template, **json.loads(special_tokens))


@cache
def load_renderer(tokenizer: Any, config: str) -> Any:
    import renderers
    from pydantic import TypeAdapter

    typed = TypeAdapter(renderers.RendererConfig).validate_python(json.loads(config))
    return renderers.create_renderer(tokenizer, typed)


def by_renderers(case: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    before = case["prompt_ids"] + case["completion_ids"]
    bridged = load_renderer(tokenizer, json.dumps(case["config"])).bridge_to_next_turn(
        case["prompt_ids"], case["completion_ids"], case["new_messages"], tools=case["tools"]
    )
    if bridged is None:
        return {"ids": None, "kept": True, "note": "renders the whole conversation again"}
    ids = list(bridged.token_ids)
    return {"ids": ids[len(before) :], "kept": ids[: len(before)] == before, "note": ""}


@cache
def trl_template(tokenizer: Any) -> tuple[str | None, str]:
    """The template that GRPO puts in place of the model's own, as `GRPOTrainer.__init__` does, and a word on it."""
    from trl.chat_template_utils import (
        get_training_chat_template,
        is_chat_template_prefix_preserving,
        supports_tool_calling,
    )

    if not supports_tool_calling(tokenizer):
        raise ValueError("TRL finds that the template does not support tool calling")
    if is_chat_template_prefix_preserving(tokenizer):
        return None, ""
    return get_training_chat_template(tokenizer), "with TRL's training template"


def by_trl(case: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    from trl.trainer.grpo_trainer import GRPOTrainer

    template, note = trl_template(tokenizer)
    trainer = SimpleNamespace(
        processing_class=tokenizer,
        chat_template=template,
        chat_template_kwargs={},
        _is_vlm=False,
        _tokenizer=tokenizer,
    )
    suffix = GRPOTrainer._get_tool_suffix_ids(trainer, case["new_messages"])
    return {"ids": suffix, "kept": True, "note": note}


def by_template(case: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    try:
        ids = tokenizer.apply_chat_template(
            case["messages"], tools=case["tools"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return {"ids": ids, "kept": True, "note": ""}
    except Exception:
        return {
            "ids": as_written_for(case, tokenizer),
            "kept": True,
            "note": "content None, arguments as text",
        }


def as_written_for(case: dict[str, Any], tokenizer: Any) -> list[int]:
    """Ids of templates that want content None with calls, and text arguments: transformers deletes None since 5.0."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    messages = json.loads(json.dumps(case["messages"]))
    for call in (call for message in messages for call in message.get("tool_calls") or ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    text = _compile_jinja_template(case["template"]).render(
        messages=messages, tools=case["tools"], add_generation_prompt=True, **case["special_tokens"]
    )
    return tokenizer.encode(text, add_special_tokens=False)


def answer(case: dict[str, Any]) -> dict[str, Any]:
    try:
        tokenizer = load_tokenizer(case["tokenizer"], json.dumps(case["special_tokens"]), case["template"])
        return {"renderers": by_renderers, "trl": by_trl, "template": by_template}[case["peer"]](case, tokenizer)
    except Exception as error:
        return {"ids": None, "kept": True, "note": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    found = [answer(case) for case in json.load(sys.stdin)["cases"]]
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
