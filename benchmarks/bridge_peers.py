"""Run the part of `bridge.py` that needs transformers, `renderers` and TRL.

Reads one JSON object per line from standard input and answers each with one line of JSON. The first object sets
everything up; its answer lists the methods that can be timed. Each other object names a method, a length and a number
of calls.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any


def whole_conversation(setting: dict[str, Any], tokenizer: Any) -> Callable[[str], object]:
    return lambda length: tokenizer.apply_chat_template(
        setting["histories"][length],
        tools=setting["tools"],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )


def renderers_bridge(setting: dict[str, Any], tokenizer: Any) -> Callable[[str], object]:
    import renderers
    from pydantic import TypeAdapter

    config = TypeAdapter(renderers.RendererConfig).validate_python({"name": setting["renderer"]})
    renderer = renderers.create_renderer(tokenizer, config)

    def run(length: str) -> object:
        bridged = renderer.bridge_to_next_turn(
            setting["contexts"][length], setting["completion"], setting["new"], tools=setting["tools"]
        )
        assert bridged is not None
        return bridged.token_ids

    return run


def trl_suffix(setting: dict[str, Any], tokenizer: Any) -> Callable[[str], object]:
    from trl.chat_template_utils import get_training_chat_template, is_chat_template_prefix_preserving
    from trl.trainer.grpo_trainer import GRPOTrainer

    preserving = is_chat_template_prefix_preserving(tokenizer)
    trainer = SimpleNamespace(
        processing_class=tokenizer,
        chat_template=None if preserving else get_training_chat_template(tokenizer),
        chat_template_kwargs={},
        _is_vlm=False,
        _tokenizer=tokenizer,
    )
    return lambda length: (
        setting["contexts"][length] + setting["completion"] + GRPOTrainer._get_tool_suffix_ids(trainer, setting["new"])
    )


WAYS = {
    "`transformers.apply_chat_template`, all of it": (whole_conversation, "transformers"),
    "`renderers`, bridge_to_next_turn": (renderers_bridge, "renderers"),
    "TRL, dummy conversation's suffix": (trl_suffix, "trl"),
}


def main() -> None:
    setting = json.loads(sys.stdin.readline())
    runs: dict[str, Callable[[str], object]] = {}
    found: dict[str, str] = {}
    try:
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=setting["tokenizer"], chat_template=setting["template"], **setting["special_tokens"]
        )
        for name, (make, package) in WAYS.items():
            try:
                runs[name] = make(setting, tokenizer)
                found[name] = f"{package} {version(package)}"
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
    except ImportError as error:
        print(error, file=sys.stderr)
    print(json.dumps(found), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        times = []
        for _ in range(asked["calls"]):
            start = time.process_time()
            runs[asked["way"]](asked["length"])
            times.append(time.process_time() - start)
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
