"""Differences between our parser and a peer's, and which is right: for `test_parsers.py` and docs/decisions/0005."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Why:
    """A class of differences."""

    right: Literal["we", "either"]
    text: str


@dataclass(frozen=True, slots=True)
class Difference:
    """The templates for which a peer parses a completion differently, for one reason."""

    why: Why
    templates: frozenset[str]


LETTERS = Why(
    "we",
    "The delimiters were sampled as letters. Tokentape reads ids; the peer decodes first and takes letters for tokens.",
)
TEXT_AFTER_CALL = Why("we", "Text after a call is content. The peer drops it, or finds no call because of it.")
CUT_OFF = Why(
    "we",
    "A call that was cut off was not made, so its text is content. The peer drops it, or returns a partial call.",
)
NO_CALL = Why("we", "An opening delimiter without a tool name is text. The peer drops it, or calls whatever follows.")
NOT_CLOSED = Why("either", "A call that lacks only its closing delimiter is a call. The peer requires the delimiter.")
LINE_BREAK = Why(
    "we",
    "A line break inside a JSON string is accepted. The peer finds no call, or returns arguments that are not JSON.",
)
NO_OBJECT = Why(
    "we",
    "Arguments that are null, or an object written as a string, become an object. The peer returns them unchanged.",
)
BROKEN = Why(
    "either",
    "A call with arguments that are not JSON stays a call, so that the agent can respond. The peer returns text.",
)
UNKNOWN = Why("we", "A call of an unknown tool stays a call, so that the agent can respond. The peer drops it.")
BARE = Why(
    "either",
    "If only JSON marks a call, JSON without a known tool name is text. The peer returns a call.",
)
NAN = Why("we", "NaN is not JSON, so the call has bad arguments. The peer turns it into a string.")
NULL = Why("we", "A null in JSON arguments stays null. The peer turns it into the text of a string parameter.")
TRIMMED = Why("we", "Whitespace at the end of a tagged value is part of the value. The peer strips it.")
SPACE_IN_VALUE = Why(
    "either", "Whitespace around a value that the template does not write is part of the value. The peer strips it."
)
PYTHON = Why(
    "we",
    "Python literals are accepted, because some templates write them. The peer drops the call, or returns text.",
)
DOUBLED = Why(
    "either",
    "A repeated delimiter is skipped if the meaning is clear. The peer returns it as text, or loses the call.",
)
LETTER_OF_TEMPLATE = Why(
    "we", "The peer knows only one spelling, including whitespace and order of headers, and finds no call."
)
SECTION = Why("we", "The completion has two sections of calls. The peer reads only the first.")
NOT_OPENED = Why(
    "we",
    "Neither prompt nor completion opened reasoning, so this is content. The peer returns it as reasoning.",
)
OPENED = Why(
    "we", "The prompt opened reasoning, so this is reasoning. The peer returns content until a delimiter closes it."
)
OPEN_REASONING = Why("we", "A call's control token ends open reasoning. The peer returns the call as reasoning.")
AGAIN = Why(
    "we", "The model opens reasoning although the prompt already did. The peer leaves the delimiter in the reasoning."
)
STOP_TOKEN = Why("we", "The stop token is not text. The peer leaves it in reasoning that was not closed.")
HEADER = Why(
    "we",
    "Words before a lone `<|message|>` that belong to no header are content, as is the rest. The peer drops both.",
)
HEADERLESS = Why("we", "A completion without a header is content. The peer drops it.")
HALF_CHARACTER = Why("either", "Half a character becomes one replacement character. The peer returns one per byte.")
LOST = Why("we", "The peer drops content before a call.")

QWEN3_5 = {"Qwen3.5-think", "Qwen3.6", "Qwen3.8"}
QWEN3 = {"Qwen3", "Qwen3-Apr2025", "fixed-trl-qwen3_training"}
QWEN2507 = {"Qwen3-Instruct-2507", "Qwen3-VL"}
NEMOTRON = {"Nemotron-3-Nano", "Nemotron-3-Super", "Nemotron-3-Ultra", "Nemotron-3.5-Lightning"}
GLM = {"GLM-4.5", "GLM-4.6", "GLM-4.7-Flash"}
LLAMA = {"Llama-3.1-3.3-Instruct", "Llama-3.2-Instruct"}
DEEPSEEK = {"DeepSeek-V3-Dec2024", "DeepSeek-R1"}
MISTRAL = {"v13", "v3_spm"}

NOT_READ_BY_TRL = frozenset(
    {
        "QwQ-32B",
        "Qwen3-Apr2025",
        "Qwen3-Coder",
        "Qwen3-Thinking-2507",
        "fixed-trl-qwen3_training",
        "GLM-4.6",
        "GLM-4.7-Flash",
        "DeepSeek-V3-Dec2024",
        "DeepSeek-R1",
        "DeepSeek-V3.1",
        "MiniMax-M2",
        "v13",
        "v3_spm",
    }
)
"""Templates for which TRL has no response template: it knows them by exact string."""

DIFFERENCES: dict[str, dict[str, tuple[Difference, ...]]] = {
    "renderers": {
        "call not closed": (
            Difference(
                NOT_CLOSED,
                frozenset(QWEN3_5 | QWEN3 | QWEN2507 | NEMOTRON | GLM | {"Qwen3-Thinking-2507", "MiniMax-M2"}),
            ),
        ),
        "text behind a call": (
            Difference(
                TEXT_AFTER_CALL,
                frozenset(
                    QWEN3_5 | QWEN3 | QWEN2507 | NEMOTRON | LLAMA | DEEPSEEK | {"Qwen3-Thinking-2507", "MiniMax-M2"}
                ),
            ),
        ),
        "line break in a string": (
            Difference(LINE_BREAK, frozenset(QWEN3 | QWEN2507 | LLAMA | DEEPSEEK | {"Qwen3-Thinking-2507", "gpt-oss"})),
        ),
        "arguments null": (
            Difference(NO_OBJECT, frozenset(QWEN3 | QWEN2507 | LLAMA | DEEPSEEK | {"Qwen3-Thinking-2507", "gpt-oss"})),
        ),
        "in a tool's name": (
            Difference(
                CUT_OFF,
                frozenset(
                    QWEN3_5
                    | QWEN3
                    | QWEN2507
                    | NEMOTRON
                    | GLM
                    | DEEPSEEK
                    | {"Qwen3-Thinking-2507", "gpt-oss", "MiniMax-M2"}
                ),
            ),
        ),
        "behind a tool's name": (
            Difference(
                CUT_OFF,
                frozenset(
                    QWEN3_5
                    | QWEN3
                    | QWEN2507
                    | NEMOTRON
                    | GLM
                    | DEEPSEEK
                    | {"Qwen3-Thinking-2507", "gpt-oss", "MiniMax-M2"}
                ),
            ),
        ),
        "in a value": (
            Difference(
                CUT_OFF,
                frozenset(
                    QWEN3_5
                    | QWEN3
                    | QWEN2507
                    | NEMOTRON
                    | GLM
                    | DEEPSEEK
                    | {"Qwen3-Thinking-2507", "gpt-oss", "MiniMax-M2"}
                ),
            ),
        ),
        "before the call's end": (
            Difference(
                NOT_CLOSED, frozenset(QWEN3_5 | QWEN3 | QWEN2507 | NEMOTRON | {"Qwen3-Thinking-2507", "MiniMax-M2"})
            ),
            Difference(CUT_OFF, frozenset(GLM)),
        ),
        "an opening delimiter alone": (
            Difference(
                NO_CALL,
                frozenset(
                    QWEN3_5
                    | QWEN3
                    | QWEN2507
                    | NEMOTRON
                    | GLM
                    | DEEPSEEK
                    | {"Qwen3-Thinking-2507", "gpt-oss", "MiniMax-M2"}
                ),
            ),
        ),
        "an opening delimiter, then text": (
            Difference(
                NO_CALL,
                frozenset(
                    QWEN3_5
                    | QWEN3
                    | QWEN2507
                    | NEMOTRON
                    | GLM
                    | DEEPSEEK
                    | {"Qwen3-Thinking-2507", "gpt-oss", "MiniMax-M2"}
                ),
            ),
        ),
        "delimiters doubled": (
            Difference(
                DOUBLED,
                frozenset(
                    QWEN3_5 | QWEN3 | QWEN2507 | NEMOTRON | GLM | DEEPSEEK | {"Qwen3-Thinking-2507", "MiniMax-M2"}
                ),
            ),
        ),
        "typed arguments": (Difference(PYTHON, frozenset(NEMOTRON | {"Qwen3.5-think"})),),
        "multi-line argument": (Difference(TRIMMED, frozenset(QWEN3_5 | NEMOTRON | GLM | {"MiniMax-M2"})),),
        "unknown tool": (
            Difference(UNKNOWN, frozenset(QWEN3_5 | NEMOTRON | GLM | {"MiniMax-M2"})),
            Difference(BARE, frozenset(LLAMA)),
        ),
        "Python's words": (Difference(PYTHON, frozenset(QWEN3_5 | NEMOTRON | GLM | {"MiniMax-M2"})),),
        "more white space": (Difference(SPACE_IN_VALUE, frozenset(GLM)),),
        "a stray control token": (
            Difference(NOT_OPENED, frozenset({"GLM-4.5", "GLM-4.6"})),
            Difference(HEADER, frozenset({"gpt-oss"})),
        ),
        "half a character": (
            Difference(NOT_OPENED, frozenset({"GLM-4.5", "GLM-4.6"})),
            Difference(HEADERLESS, frozenset({"gpt-oss"})),
        ),
        "a call twice": (Difference(SECTION, frozenset({"DeepSeek-R1"})),),
    },
    "trl": {
        "call not closed": (Difference(NOT_CLOSED, frozenset(QWEN2507 | {"Qwen2.5-Instruct", "Qwen3"})),),
        "line break in a string": (
            Difference(LINE_BREAK, frozenset(QWEN2507 | LLAMA | {"Qwen2.5-Instruct", "Qwen3", "gpt-oss"})),
        ),
        "a call in letters": (
            Difference(
                LETTERS,
                frozenset(QWEN3_5 | QWEN2507 | NEMOTRON | {"Qwen2.5-Instruct", "Qwen3", "Qwen3.5-nothink", "GLM-4.5"}),
            ),
        ),
        "reasoning in letters": (
            Difference(
                LETTERS,
                frozenset(QWEN3_5 | QWEN2507 | NEMOTRON | {"Qwen2.5-Instruct", "Qwen3", "Qwen3.5-nothink", "GLM-4.5"}),
            ),
        ),
        "delimiters in a value": (
            Difference(
                LETTERS,
                frozenset(QWEN3_5 | QWEN2507 | NEMOTRON | {"Qwen2.5-Instruct", "Qwen3", "Qwen3.5-nothink", "GLM-4.5"}),
            ),
        ),
        "delimiters doubled": (
            Difference(
                DOUBLED,
                frozenset(
                    QWEN3_5
                    | QWEN2507
                    | NEMOTRON
                    | {"Qwen2.5-Instruct", "Qwen3", "Qwen3.5-nothink", "GLM-4.5", "gpt-oss"}
                ),
            ),
        ),
        "a broken value": (Difference(BROKEN, frozenset(QWEN2507 | {"Qwen2.5-Instruct", "Qwen3", "gpt-oss"})),),
        "JSON not closed": (Difference(BROKEN, frozenset(QWEN2507 | {"Qwen2.5-Instruct", "Qwen3", "gpt-oss"})),),
        "reasoning not closed before a call": (
            Difference(OPEN_REASONING, frozenset(QWEN3_5 | NEMOTRON | {"Qwen3", "GLM-4.5"})),
        ),
        "in a tool's name": (Difference(CUT_OFF, frozenset({"Qwen3", "GLM-4.5", "gpt-oss"})),),
        "behind a tool's name": (Difference(CUT_OFF, frozenset({"Qwen3", "GLM-4.5", "gpt-oss"})),),
        "in a value": (
            Difference(CUT_OFF, frozenset(QWEN3_5 | NEMOTRON | {"Qwen3", "Qwen3.5-nothink", "GLM-4.5", "gpt-oss"})),
        ),
        "an opening delimiter alone": (
            Difference(NO_CALL, frozenset(QWEN3_5 | NEMOTRON | {"Qwen3", "Qwen3.5-nothink", "GLM-4.5", "gpt-oss"})),
        ),
        "an opening delimiter, then text": (
            Difference(NO_CALL, frozenset(QWEN3_5 | NEMOTRON | {"Qwen3", "Qwen3.5-nothink", "gpt-oss"})),
        ),
        "multi-line argument": (Difference(TRIMMED, frozenset(QWEN3_5 | NEMOTRON | {"Qwen3.5-nothink", "GLM-4.5"})),),
        "Python's words": (Difference(PYTHON, frozenset(QWEN3_5 | NEMOTRON | {"Qwen3.5-nothink", "GLM-4.5"})),),
        "reasoning opened again": (Difference(AGAIN, frozenset(QWEN3_5 | NEMOTRON)),),
        "a stray control token": (
            Difference(STOP_TOKEN, frozenset(QWEN3_5 | NEMOTRON)),
            Difference(HEADER, frozenset({"gpt-oss"})),
        ),
        "half a character": (
            Difference(STOP_TOKEN, frozenset(QWEN3_5 | NEMOTRON)),
            Difference(HEADERLESS, frozenset({"gpt-oss"})),
        ),
        "content and call": (Difference(LOST, frozenset({"GLM-4.5"})),),
        "no white space": (Difference(LETTER_OF_TEMPLATE, frozenset({"GLM-4.5"})),),
        "more white space": (Difference(LETTER_OF_TEMPLATE, frozenset(LLAMA | {"GLM-4.5", "gpt-oss"})),),
        "before the call's end": (Difference(CUT_OFF, frozenset({"GLM-4.5"})),),
        "text behind a call": (
            Difference(BROKEN, frozenset({"gpt-oss"})),
            Difference(TEXT_AFTER_CALL, frozenset(LLAMA)),
        ),
        "a call twice": (Difference(LETTER_OF_TEMPLATE, frozenset({"gpt-oss"})),),
        "recipient behind the channel": (Difference(LETTER_OF_TEMPLATE, frozenset({"gpt-oss"})),),
        "unknown tool": (Difference(BARE, frozenset(LLAMA)),),
        "in reasoning": (Difference(OPENED, frozenset(NEMOTRON)),),
    },
    "vllm": {
        "text behind a call": (
            Difference(
                TEXT_AFTER_CALL,
                frozenset(
                    QWEN3_5
                    | QWEN3
                    | QWEN2507
                    | NEMOTRON
                    | GLM
                    | LLAMA
                    | DEEPSEEK
                    | MISTRAL
                    | {
                        "Qwen2.5-Instruct",
                        "QwQ-32B",
                        "Qwen3-Coder",
                        "Qwen3-Thinking-2507",
                        "Qwen3.5-nothink",
                        "DeepSeek-V3.1",
                        "MiniMax-M2",
                    }
                ),
            ),
        ),
        "null argument": (Difference(NULL, frozenset({"v13"})),),
        "arguments as a string": (
            Difference(
                NO_OBJECT,
                frozenset(
                    QWEN3
                    | QWEN2507
                    | LLAMA
                    | DEEPSEEK
                    | {"Qwen2.5-Instruct", "QwQ-32B", "Qwen3-Thinking-2507", "gpt-oss", "DeepSeek-V3.1", "v13"}
                ),
            ),
        ),
        "line break in a string": (
            Difference(
                LINE_BREAK,
                frozenset(
                    QWEN3
                    | QWEN2507
                    | LLAMA
                    | DEEPSEEK
                    | MISTRAL
                    | {"Qwen2.5-Instruct", "QwQ-32B", "Qwen3-Thinking-2507", "gpt-oss", "DeepSeek-V3.1"}
                ),
            ),
        ),
        "arguments null": (
            Difference(
                NO_OBJECT,
                frozenset(
                    QWEN3
                    | QWEN2507
                    | LLAMA
                    | DEEPSEEK
                    | {"Qwen2.5-Instruct", "QwQ-32B", "Qwen3-Thinking-2507", "gpt-oss", "DeepSeek-V3.1", "v13"}
                ),
            ),
        ),
        "a call in letters": (
            Difference(
                LETTERS,
                frozenset(
                    QWEN3_5
                    | QWEN3
                    | QWEN2507
                    | NEMOTRON
                    | GLM
                    | LLAMA
                    | DEEPSEEK
                    | MISTRAL
                    | {
                        "Qwen2.5-Instruct",
                        "QwQ-32B",
                        "Qwen3-Coder",
                        "Qwen3-Thinking-2507",
                        "Qwen3.5-nothink",
                        "DeepSeek-V3.1",
                        "MiniMax-M2",
                    }
                ),
            ),
        ),
        "delimiters in a value": (
            Difference(
                LETTERS,
                frozenset(QWEN3 | QWEN2507 | GLM | {"Qwen2.5-Instruct", "QwQ-32B", "Qwen3-Thinking-2507", "v13"}),
            ),
        ),
        "delimiters doubled": (
            Difference(
                DOUBLED,
                frozenset(
                    QWEN3
                    | QWEN2507
                    | GLM
                    | {"Qwen2.5-Instruct", "QwQ-32B", "Qwen3-Thinking-2507", "DeepSeek-R1", "DeepSeek-V3.1", "v13"}
                ),
            ),
        ),
        "a broken value": (
            Difference(
                BROKEN, frozenset(QWEN3 | QWEN2507 | {"Qwen2.5-Instruct", "QwQ-32B", "Qwen3-Thinking-2507", "v3_spm"})
            ),
        ),
        "JSON not closed": (
            Difference(
                BROKEN, frozenset(QWEN3 | QWEN2507 | {"Qwen2.5-Instruct", "QwQ-32B", "Qwen3-Thinking-2507", "v3_spm"})
            ),
        ),
        "reasoning in letters": (
            Difference(
                LETTERS,
                frozenset(
                    QWEN3_5
                    | QWEN3
                    | NEMOTRON
                    | GLM
                    | {"Qwen3-Thinking-2507", "Qwen3.5-nothink", "DeepSeek-R1", "MiniMax-M2"}
                ),
            ),
        ),
        "a stray control token": (
            Difference(NOT_OPENED, frozenset(QWEN3 | {"GLM-4.5", "GLM-4.6"})),
            Difference(HEADER, frozenset({"gpt-oss"})),
            Difference(NO_CALL, frozenset({"v3_spm"})),
        ),
        "half a character": (
            Difference(NOT_OPENED, frozenset(QWEN3 | {"GLM-4.5", "GLM-4.6"})),
            Difference(HEADERLESS, frozenset({"gpt-oss"})),
            Difference(HALF_CHARACTER, frozenset({"v3_spm"})),
        ),
        "Python's words": (
            Difference(PYTHON, frozenset(QWEN3_5 | NEMOTRON | GLM | {"Qwen3-Coder", "Qwen3.5-nothink", "MiniMax-M2"})),
        ),
        "in a tool's name": (
            Difference(
                CUT_OFF,
                frozenset(
                    QWEN3_5
                    | NEMOTRON
                    | GLM
                    | DEEPSEEK
                    | MISTRAL
                    | {"Qwen3-Coder", "Qwen3.5-nothink", "DeepSeek-V3.1", "MiniMax-M2"}
                ),
            ),
        ),
        "behind a tool's name": (
            Difference(
                CUT_OFF,
                frozenset(
                    QWEN3_5
                    | NEMOTRON
                    | GLM
                    | DEEPSEEK
                    | MISTRAL
                    | {"Qwen3-Coder", "Qwen3.5-nothink", "DeepSeek-V3.1", "MiniMax-M2"}
                ),
            ),
        ),
        "in a value": (
            Difference(
                CUT_OFF,
                frozenset(
                    QWEN3_5
                    | NEMOTRON
                    | GLM
                    | DEEPSEEK
                    | MISTRAL
                    | {"Qwen3-Coder", "Qwen3.5-nothink", "gpt-oss", "DeepSeek-V3.1", "MiniMax-M2"}
                ),
            ),
        ),
        "an opening delimiter alone": (
            Difference(
                NO_CALL,
                frozenset(
                    QWEN3_5
                    | NEMOTRON
                    | GLM
                    | DEEPSEEK
                    | MISTRAL
                    | {"Qwen3-Coder", "Qwen3.5-nothink", "gpt-oss", "DeepSeek-V3.1", "MiniMax-M2"}
                ),
            ),
        ),
        "an opening delimiter, then text": (
            Difference(
                NO_CALL,
                frozenset(
                    QWEN3_5
                    | NEMOTRON
                    | GLM
                    | DEEPSEEK
                    | MISTRAL
                    | {"Qwen3-Coder", "Qwen3.5-nothink", "gpt-oss", "DeepSeek-V3.1", "MiniMax-M2"}
                ),
            ),
        ),
        "unknown tool": (
            Difference(UNKNOWN, frozenset(GLM | {"MiniMax-M2"})),
            Difference(BARE, frozenset(LLAMA)),
        ),
        "before the call's end": (
            Difference(CUT_OFF, frozenset(GLM)),
            Difference(NOT_CLOSED, frozenset({"v3_spm"})),
        ),
        "more white space": (Difference(LETTER_OF_TEMPLATE, frozenset(DEEPSEEK | {"gpt-oss", "DeepSeek-V3.1"})),),
        "NaN": (Difference(NAN, frozenset({"v13"})),),
        "call not closed": (Difference(NOT_CLOSED, frozenset({"v3_spm"})),),
    },
}
"""Per peer and name of a completion, the templates where we differ, and why."""
