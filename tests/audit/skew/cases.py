"""Known bugs reproduced on real tokenizers: side A is correct, side B has one real-world fault.

The numbers are those of the table in docs/how-to/audit.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tests.chat.conftest import model_path
from tokentape.audit._skew.backends import BackendOptions, Rendering, SkewChat
from tokentape.audit._skew.backends.spec import SpecBackend, open_json
from tokentape.audit._skew.findings import Kind
from tokentape.audit._skew.parts import byte_level, metaspace
from tokentape.chat._template import ChatTemplate
from tokentape.demo import MODEL

TINY = "tiny"
Spec = Mapping[str, Any]


@dataclass(frozen=True)
class Base:
    """A healthy tokenizer and template, from which sick ones are made."""

    spec: Spec
    config: Mapping[str, Any]
    template: str | None

    def side(
        self,
        name: str = "B",
        *,
        spec: Spec | None = None,
        config: Mapping[str, Any] | None = None,
        template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
        kind: type[SpecBackend] = SpecBackend,
    ) -> SpecBackend:
        source = template or self.template
        return kind(
            name,
            self.spec if spec is None else spec,
            config=self.config if config is None else config,
            template=ChatTemplate(source) if source else None,
            options=BackendOptions(kwargs=kwargs or {}),
        )


def base(family: str, template: str | None = None) -> Base:
    """The tokenizer of a family, or of the tiny model, with a template file if one is named."""
    return _base(model_folder(family), model_path(template) if template else None)


@cache
def _base(folder: Path, template: Path | None) -> Base:
    source = template.read_text(encoding="utf-8") if template else None
    if source is None and (folder / "chat_template.jinja").is_file():
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    return Base(json.loads((folder / "tokenizer.json").read_bytes()), config, source)


def healthy(family: str, template: str | None = None) -> SpecBackend:
    return _healthy(model_folder(family), model_path(template) if template else None)


class _Remembering(SpecBackend):
    """Renders each conversation once: every audit asks a healthy side for the same hundreds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._renderings: dict[str, Rendering] = {}

    def render(self, conversation: SkewChat) -> Rendering:
        key = repr((conversation.messages, conversation.tools, conversation.generate))
        if key not in self._renderings:
            self._renderings[key] = super().render(conversation)
        return self._renderings[key]


@cache
def _healthy(folder: Path, template: Path | None) -> SpecBackend:
    return _base(folder, template).side("A", kind=_Remembering)


def model_folder(family: str) -> Path:
    return MODEL if family == TINY else model_path(family)


def opened(folder: Path) -> SpecBackend:
    return open_json(str(folder), folder, BackendOptions())


@dataclass(frozen=True)
class Case:
    row: int
    what: str
    family: str
    kind: Kind
    make: Callable[[Base], SpecBackend]
    template: str | None = None
    cause: str = ""
    """What the cause must mention."""
    example: str | None = None
    """What the smallest input must match, if it is a text."""
    also: tuple[Kind, ...] = ()
    """What else is wrong with it, and found too."""
    severity: str = "skew"
    real: bool = False
    """Whether it shows only with a vocabulary as large as a model's."""

    def __str__(self) -> str:
        return f"{self.row}-{self.what.replace(' ', '-')}"


def part(name: str, value: Any) -> Callable[[Base], SpecBackend]:
    return lambda base: base.side(spec={**base.spec, name: value})


def split(name: str) -> Callable[[Base], SpecBackend]:
    return part("pre_tokenizer", byte_level(name))


def flags(only: str = ".*", **changed: Any) -> Callable[[Base], SpecBackend]:
    def make(base: Base) -> SpecBackend:
        tokens = [{**t, **changed} if re.fullmatch(only, t["content"]) else t for t in base.spec["added_tokens"]]
        return base.side(spec={**base.spec, "added_tokens": tokens})

    return make


def unknown(*contents: str) -> Callable[[Base], SpecBackend]:
    """The added tokens are not in the table, nor in the vocabulary."""

    def make(base: Base) -> SpecBackend:
        return base.side(spec=without_tokens(base.spec, contents))

    return make


def without_tokens(spec: Spec, contents: Sequence[str]) -> dict[str, Any]:
    return {**spec, "added_tokens": [t for t in spec["added_tokens"] if t["content"] not in contents]}


def edited(*changes: tuple[str, str]) -> Callable[[Base], SpecBackend]:
    """The template with pieces replaced, each of which must be there."""

    def make(base: Base) -> SpecBackend:
        source = base.template
        assert source is not None
        for old, new in changes:
            assert old in source, old
            source = source.replace(old, new)
        return base.side(template=source)

    return make


def config(**changed: Any) -> Callable[[Base], SpecBackend]:
    return lambda base: base.side(config={**base.config, **changed})


def running(kind: type[SpecBackend]) -> Callable[[Base], SpecBackend]:
    return lambda base: base.side(kind=kind)


def with_template(path: str) -> Callable[[Base], SpecBackend]:
    return lambda base: base.side(template=model_path(path).read_text(encoding="utf-8"))


def fewer_merges(base: Base) -> SpecBackend:
    model = dict(base.spec["model"])
    model["merges"] = model["merges"][: len(model["merges"]) // 2]
    return base.side(spec={**base.spec, "model": model})


def kimi_by_auto(base: Base) -> SpecBackend:
    spec = without_tokens(base.spec, ("<think>", "</think>"))
    return base.side(spec={**spec, "pre_tokenizer": byte_level("kimi-k2")})


class EncodesSpecial(SpecBackend):
    """Renders, and then prepends BOS to the rendering."""

    def render(self, conversation: SkewChat) -> Rendering:
        made = super().render(conversation)
        assert made.text is not None
        return Rendering(self.encode([made.text], special=True)[0], made.text)


class NeverPrompts(SpecBackend):
    """Drops add_generation_prompt on its way to the template."""

    def render(self, conversation: SkewChat) -> Rendering:
        return super().render(replace(conversation, generate=False))


class PromotesEmpty(SpecBackend):
    """Makes content parts of empty text, which the template prints."""

    def render(self, conversation: SkewChat) -> Rendering:
        printed = str([{"type": "text", "text": ""}])
        messages = tuple({**m, "content": printed} if m.get("content") == "" else m for m in conversation.messages)
        return super().render(replace(conversation, messages=messages))


class CleansUp(SpecBackend):
    """Decodes as clean_up_tokenization_spaces does."""

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        rules = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"))
        rules += ((" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))
        texts = super().decode(sequences)
        for found, put in rules:
            texts = [text.replace(found, put) for text in texts]
        return texts


class KeepsText(SpecBackend):
    """Keeps messages from becoming control tokens: their spellings are encoded as text."""

    def render(self, conversation: SkewChat) -> Rendering:
        made = super().render(conversation)
        assert made.text is not None
        contents = [str(m.get("content") or "") for m in conversation.messages]
        ids: list[int] = []
        pieces = re.split(
            f"({'|'.join(re.escape(t) for t in sorted(self.facts.added, key=len, reverse=True))})", made.text
        )
        spelled = [t for text in contents for t in self.facts.added if t in text]
        if not spelled:
            return made
        plain = SpecBackend("plain", without_tokens(self.facts.spec or {}, tuple(self.facts.added)))
        for piece in pieces:
            ids += plain.encode([piece])[0] if piece in spelled else self.encode([piece])[0]
        return Rendering(ids, made.text)


QWEN3 = "qwen3/templates/Qwen3.jinja"
TRAINING = "qwen3/templates/fixed-trl-qwen3_training.jinja"
CODER = "qwen3/templates/Qwen3-Coder.jinja"
LLAMA = "llama3/templates/Llama-3.1-3.3-Instruct.jinja"
GLM = "glm4_5/templates/GLM-4.5.jinja"
MISTRAL = "mistral_v3_spm/templates/v3_spm.jinja"
_STRIPPED = {"type": "Replace", "pattern": {"Regex": "[\u0000-\u0008]"}, "content": ""}

CASES = (
    Case(1, "a wrong split from the converter", "mistral_nemo", "pre-tokenizer", split("cl100k_base"), cause="Split"),
    Case(
        2,
        "ByteLevel replaced by Metaspace",
        "deepseek_v3",
        "pre-tokenizer",
        part("pre_tokenizer", metaspace("always", split=True)),
        cause="Metaspace",
    ),
    Case(1, "a wrong split, tiny", TINY, "pre-tokenizer", split("gpt2"), cause="Split"),
    Case(
        2,
        "ByteLevel replaced by Metaspace, tiny",
        TINY,
        "pre-tokenizer",
        part("pre_tokenizer", metaspace("always", split=True)),
        cause="Metaspace",
    ),
    Case(10, "another table of added tokens, tiny", TINY, "added token", unknown("<tool_call>", "</tool_call>")),
    Case(3, "the split of GPT-2", "glm4_5", "pre-tokenizer", split("gpt2"), cause="Split"),
    Case(4, "a control token encoded as text", TINY, "added token", unknown("<tool_call>"), cause="<tool_call>"),
    Case(
        5,
        "a slow tokenizer that splits its end token",
        "mistral_v3_spm",
        "added token",
        unknown("</s>"),
        cause="</s>",
        example="</s>",
    ),
    Case(
        6,
        "legacy space before the first word",
        "mistral_v3_spm",
        "pre-tokenizer",
        part("pre_tokenizer", metaspace("always", split=False)),
        cause="prepend_scheme",
    ),
    Case(9, "Kimi by AutoTokenizer", "qwen3", "pre-tokenizer", kimi_by_auto, also=("added token",), real=True),
    Case(
        10,
        "another table of added tokens",
        "qwen3",
        "added token",
        unknown("<tool_call>", "</tool_call>"),
        cause="'<tool_call>' and 1 more are added tokens in A but not in B",
    ),
    Case(
        11,
        "control characters dropped",
        TINY,
        "normalizer",
        lambda base: base.side(
            spec={**base.spec, "normalizer": {"type": "Sequence", "normalizers": [base.spec["normalizer"], _STRIPPED]}}
        ),
        cause="Replace",
        example="[\x00-\x08]",
    ),
    Case(12, "another revision", TINY, "merges", fewer_merges, cause="merges differ"),
    Case(13, "BOS twice", "llama3", "BOS/EOS", running(EncodesSpecial), template=LLAMA, cause="begin_of_text.> before"),
    Case(15, "no BOS", "mistral_v3_spm", "BOS/EOS", part("post_processor", None), cause="<s> before"),
    Case(
        16,
        "[gMASK]<sop> missing",
        TINY,
        "template",
        edited(("[gMASK]<sop>\n", "")),
        template=GLM,
        cause=r"\[gMASK\]<sop>",
    ),
    Case(
        17,
        "control tokens that eat white space",
        TINY,
        "added token",
        flags("<.im_.*", rstrip=True),
        cause="rstrip=False against True",
        example=r"<\|im_\w+\|>\s",
    ),
    Case(
        18,
        "text that becomes control",
        TINY,
        "control text",
        running(KeepsText),
        cause="A turns message text into control tokens",
    ),
    Case(
        20, "a space behind [INST]", "mistral_v3_spm", "template", edited(("'[INST] '", "'[INST]'")), template=MISTRAL
    ),
    Case(21, "add_generation_prompt lost", TINY, "generation prompt", running(NeverPrompts), cause="B writes less"),
    Case(22, "empty text made a list of parts", TINY, "content parts", running(PromotesEmpty), cause="B prints"),
    Case(23, "thinking kept by another template", TINY, "reasoning", with_template(TRAINING), template=QWEN3),
    Case(
        24,
        "a framework's own template",
        TINY,
        "booleans",
        with_template("qwen3_5/templates/Qwen3.6.jinja"),
        template="qwen3_5/templates/Qwen3.5-think.jinja",
        cause="None|True",
    ),
    Case(
        26,
        "another date",
        TINY,
        "date",
        edited(('"26 Jul 2024"', '"27 Jul 2024"')),
        template=LLAMA,
        cause="27 Jul 2024",
    ),
    Case(
        27,
        "tojson that escapes",
        TINY,
        "JSON",
        edited(("tool | tojson", "tool | tojson(ensure_ascii=true)")),
        cause="escaped",
    ),
    Case(
        28,
        "booleans as Python writes them",
        TINY,
        "booleans",
        edited(
            ("else args_value | string", "else args_value | tojson if args_value is boolean else args_value | string")
        ),
        template=CODER,
    ),
    Case(29, "another end token", TINY, "template", edited(("<|im_end|>", "<|endoftext|>")), cause="im_end"),
    Case(30, "no newline behind the end token", TINY, "template", edited(("+ '<|im_end|>\\n'", "+ '<|im_end|>'"))),
    Case(31, "padding that is EOS", TINY, "padding", config(pad_token="<|im_end|>"), cause="it is the EOS token in B"),
    Case(
        32,
        "a template that marks nothing",
        TINY,
        "loss mask",
        edited(("{%- generation %}", ""), ("{%- endgeneration %}", "")),
        template=TRAINING,
        cause="only A's template marks",
        severity="caution",
    ),
    Case(
        33,
        "a mask over the user's turn",
        TINY,
        "loss mask",
        edited(
            (
                "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}",
                "{%- generation %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}"
                "{%- endgeneration %}",
            )
        ),
        template=TRAINING,
        cause="mark different tokens|other roles' text",
    ),
    Case(34, "clean-up when decoding", TINY, "decode clean-up", running(CleansUp), cause="B removes spaces"),
    Case(
        35,
        "a leading space lost",
        "mistral_v3_spm",
        "decoder",
        lambda base: base.side(
            spec={**base.spec, "decoder": {"type": "Sequence", "decoders": base.spec["decoder"]["decoders"][:3]}}
        ),
        cause="Strip",
    ),
)
