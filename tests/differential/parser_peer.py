"""What vLLM, TRL and `renderers` parse from completions, run in separate environments.

Run by `test_parsers.py` with other Pythons, never imported. Reads one JSON object from standard input,
{"cases": [...]}, and writes the answers, in order, to the file that its only argument names. A case has

    peer              `vllm`, `trl` or `renderers`
    tokenizer         path of a tokenizer.json
    special_tokens    bos_token, eos_token, ...
    template          source of the chat template
    config            for `renderers`: fields of its typed configuration; for `vllm`: `tools`, `reasoning`, `kwargs`
    prompt_ids, completion_ids, tools
    ended         the model stopped: `completion_ids` end with the stop token

An answer has `content`, `reasoning`, `calls`, a list of
[name, arguments as JSON text], and `note`, how the peer failed; all else is null then.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any


@cache
def load_tokenizer(path: str, special_tokens: str, template: str, *, for_vllm: bool) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=path, chat_template=template, **json.loads(special_tokens))
    if for_vllm:
        from vllm.tokenizers.hf import get_cached_tokenizer

        return get_cached_tokenizer(tokenizer)
    return tokenizer


@cache
def vllm_parser(tools: str, reasoning: str | None) -> Any:
    from vllm.parser.parser_manager import ParserManager

    return ParserManager.get_parser(tools, reasoning, enable_auto_tools=True, is_harmony=tools == "openai")


def by_vllm(case: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """As its chat endpoint does for a request that does not stream."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    config = case["config"]
    request = ChatCompletionRequest(
        model="model",
        messages=[{"role": "user", "content": "question"}],
        tools=case["tools"],
        tool_choice="auto",
        chat_template_kwargs=config["kwargs"],
    )
    parser = vllm_parser(config["tools"], config["reasoning"])(
        tokenizer, request.tools, chat_template_kwargs=config["kwargs"]
    )
    request = parser.adjust_request(request)
    parser.set_prompt_token_ids(case["prompt_ids"])
    ids = case["completion_ids"]
    without_stop = ids[:-1] if case["ended"] else ids
    text = tokenizer.decode(without_stop, skip_special_tokens=request.skip_special_tokens)
    reasoning, content, calls = parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=ids)
    return {
        "content": content or "",
        "reasoning": reasoning or "",
        "calls": [[call.name, call.arguments] for call in calls or ()],
        "note": "",
    }


def by_trl(case: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """As its GRPO trainer does: transformers' `parse_response` with the response template that TRL has for a model."""
    from trl.chat_template_utils import add_response_schema, parse_response

    if getattr(tokenizer, "response_template", None) is None:
        add_response_schema(tokenizer)
    found = parse_response(tokenizer, case["completion_ids"], prefix=case["prompt_ids"], tools=case["tools"])
    calls = [call["function"] for call in found.get("tool_calls") or ()]
    return {
        "content": found.get("content") or "",
        "reasoning": found.get("reasoning_content") or found.get("thinking") or "",
        "calls": [[call["name"], as_text(call["arguments"])] for call in calls],
        "note": "",
    }


@cache
def load_renderer(tokenizer: Any, config: str) -> Any:
    import renderers
    from pydantic import TypeAdapter

    typed = TypeAdapter(renderers.RendererConfig).validate_python(json.loads(config))
    return renderers.create_renderer(tokenizer, typed)


def by_renderers(case: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    found = load_renderer(tokenizer, json.dumps(case["config"])).parse_response(
        case["completion_ids"], tools=case["tools"], prompt_ids=case["prompt_ids"]
    )
    return {
        "content": found.content or "",
        "reasoning": found.reasoning_content or "",
        "calls": [[call.name, as_text(call.arguments)] for call in found.tool_calls if call.status.value == "ok"],
        "note": "",
    }


def as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def answer(case: dict[str, Any]) -> dict[str, Any]:
    try:
        special_tokens, for_vllm = json.dumps(case["special_tokens"]), case["peer"] == "vllm"
        tokenizer = load_tokenizer(case["tokenizer"], special_tokens, case["template"], for_vllm=for_vllm)
        return {"vllm": by_vllm, "trl": by_trl, "renderers": by_renderers}[case["peer"]](case, tokenizer)
    except Exception as error:
        note = f"{type(error).__name__}: {error}"
        return {"content": None, "reasoning": None, "calls": None, "note": note}


if __name__ == "__main__":
    found = [answer(case) for case in json.load(sys.stdin)["cases"]]
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
