"""Models of other projects: prompts, bridges and replies, compared with `apply_chat_template`.

    python -m tests.chat.named_models --models FOLDER --conversations 200
    python -m tests.chat.named_models --models FOLDER --only SmolLM3 --number 17      # a single conversation

FOLDER holds chat templates (`NAME.jinja`) and model folders (with `tokenizer.json` and `chat_template.jinja`). A
template without a tokenizer gets a small one, trained for it, that has its control tokens; `NAME.json` beside it may
set the `eos_token` that ends turns, and name `controls` that the template assembles from pieces. Conversations,
completions and the comparison are those of `tests.generator`; the oracle is the folder's tokenizer as transformers
loads it. Conversations that it refuses are not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import AutoTokenizer

from tests.generator.conversations import Conversation, Message, constants_of, conversations
from tests.generator.examine import takes_text
from tests.generator.judge import Judge
from tests.generator.mutate import as_template
from tests.generator.options import Case, defaults
from tests.generator.oracle import Reference, Refused, frozen_clock
from tests.generator.product import Product
from tests.generator.replies import SampledTurn
from tests.generator.vocabularies import write_model
from tokentape.errors import TokentapeError


class Transformers(Reference):
    """A model folder, as `AutoTokenizer` loads and renders it."""

    def __init__(self, folder: Path, kwargs: dict[str, bool]) -> None:
        super().__init__(folder, kwargs)
        self._auto = AutoTokenizer.from_pretrained(folder)
        self._tokenizer = self._auto.backend_tokenizer
        self._kwargs = kwargs

    def _render(self, messages: Sequence[Message], tools: Sequence[Message], *, generate: bool) -> str | Refused:
        try:
            with frozen_clock():
                return str(
                    self._auto.apply_chat_template(
                        [self.template_message(message) for message in messages],
                        tools=list(tools) or None,
                        add_generation_prompt=generate,
                        tokenize=False,
                        **self._kwargs,
                    )
                )
        except Exception as error:  # a template may raise anything
            return Refused(f"{type(error).__name__}: {error}")


class CompletionsAtRandom(Judge):
    """Also judges random ids: alone, and in place of the content of the template's turn."""

    def _truncated(self, conversation: Conversation, turn: SampledTurn) -> None:
        super()._truncated(conversation, turn)
        rng, tokenizer = self.rng_of(f"random ids {conversation.number}"), self.product.renderer.tokenizer
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(1, 40))]
        text = [token_id for token_id in ids if tokenizer.control_by_id(token_id) is None]
        content = (conversation.reply.get("content") or "").strip()
        before = turn.text.partition(content)[0] if content and content in turn.text else ""
        if self.product.left_in_reasoning(
            self.reference.render(conversation.history, conversation.tools, generate=True), before
        ):
            before += self.product.reasoning[1]
        opened = [*self.reference.encode(before).ids, *text]
        ended = [*opened, *turn.ids[-1:]] if turn.stop and not conversation.reply.get("tool_calls") else text
        for sampled in (ids, opened, ended):
            self.counts["random completions"] += 1
            self._after_any(conversation, sampled)


def folders(models: Path, scratch: Path, only: str = "") -> Iterator[tuple[str, Path]]:
    """Yield each model's name, if `only` is in it, and folder. Templates alone get a folder in `scratch`."""
    scratch.mkdir(exist_ok=True)
    for path in sorted(models.iterdir()):
        if only not in path.name:
            continue
        if (path / "tokenizer.json").is_file():
            yield path.name, _completed(path, scratch / path.name)
        elif path.suffix == ".jinja":
            case = Case(1, 0, defaults())
            config = path.with_suffix(".json")
            known = json.loads(config.read_bytes()) if config.is_file() else {}
            template = as_template(path.read_text(encoding="utf-8"), known.get("eos_token"), known.get("controls", ()))
            yield path.stem, write_model(case, template, scratch / path.stem)


def _completed(folder: Path, scratch: Path) -> Path:
    """Return the model folder with the oracle's files: ids that end turns, and the template as a file."""
    scratch.mkdir()
    for path in folder.iterdir():
        (scratch / path.name).symlink_to(path.resolve())
    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    if not (scratch / "chat_template.jinja").exists():
        (scratch / "chat_template.jinja").write_text(config["chat_template"], encoding="utf-8")
    if not (scratch / "generation_config.json").exists():
        eos = config["eos_token"] if isinstance(config["eos_token"], str) else config["eos_token"]["content"]
        added = json.loads((folder / "tokenizer.json").read_bytes())["added_tokens"]
        ids = [token["id"] for token in added if token["content"] == eos]
        (scratch / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}), encoding="utf-8")
    return scratch


def judge(name: str, folder: Path, numbers: Sequence[int], count: int, kwargs: dict[str, bool]) -> Judge:
    """Judge the product on `count` conversations of these numbers."""

    def rng_of(purpose: str) -> random.Random:
        return random.Random(f"{name} {purpose}")

    reference = Transformers(folder, kwargs)
    judged = CompletionsAtRandom(reference, Product(folder, kwargs), frozenset(), rng_of)
    source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    controls, as_text = sorted(reference.controls), takes_text(reference)
    made = conversations(rng_of, source, controls, numbers, arguments_as_text=as_text)
    judged.judge(
        [conversation for conversation in made if _renders(reference, conversation)][:count], constants_of(source)
    )
    return judged


def _renders(reference: Reference, conversation: Conversation) -> bool:
    try:
        reference.render(
            [*conversation.history, conversation.reply, *conversation.new], conversation.tools, generate=True
        )
    except Refused:
        return False
    return True


def run(models: Path, count: int, only: str = "", number: int | None = None, *, no_thinking: bool = False) -> int:
    """Judge each model in turn, print the comparisons and findings, and return the number of findings."""
    kwargs = {"enable_thinking": False} if no_thinking else {}
    numbers = range(10 * count) if number is None else [number]
    count_found = 0
    with TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, folder in folders(models, Path(scratch), only):
            started = time.process_time()
            try:
                judged = judge(name, folder, numbers, count, kwargs)
            except TokentapeError as error:
                print(f"{name}: refused: {error}", flush=True)
                count_found += 1
                continue
            print(f"{name}: {dict(judged.counts)}; {time.process_time() - started:.0f} s of CPU", flush=True)
            for kind, times in Counter(finding.kind for finding in judged.findings).items():
                example = next(finding for finding in judged.findings if finding.kind == kind)
                print(f"  {times} x {kind}: conversation {example.conversation}: {example.detail}", flush=True)
            count_found += len(judged.findings)
    return count_found


def main() -> int:
    """Judge the models that the command line names; the status is 1 if there are findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.chat.named_models", description=__doc__)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--only", default="", help="models with this in their names")
    parser.add_argument("--number", type=int, help="this conversation alone")
    parser.add_argument("--no-thinking", action="store_true", help="render with enable_thinking=False")
    o = parser.parse_args()
    return int(run(o.models, o.conversations, o.only, o.number, no_thinking=o.no_thinking) > 0)


if __name__ == "__main__":
    sys.exit(main())
