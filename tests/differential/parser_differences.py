"""Where our parser and a peer's differ, and who is right: the data of `test_parsers.py` and docs/decisions/0005."""

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
    """The templates on which a peer reads a completion in another way than we, for one reason."""

    why: Why
    templates: frozenset[str]


LETTERS = Why(
    "we", "Delimiters were sampled as letters. We read ids; the peer decodes them first and takes them for tokens."
)
BEHIND = Why("we", "Text behind a call is content. The peer drops it, or for its sake finds no call.")
CUT_OFF = Why(
    "we",
    "The call was cut off: it was not made, and its text is content. The peer drops it or calls with what there is.",
)
NO_CALL = Why(
    "we", "An opening delimiter that names no tool is text. The peer drops it, or calls what stands behind it."
)
NOT_CLOSED = Why(
    "either", "A call that is complete but for its closing delimiter is one. The peer wants the delimiter."
)
LINE_BREAK = Why(
    "we", "A line break within a JSON string is read as such. The peer finds no call, or hands on what is no JSON."
)
NO_OBJECT = Why(
    "we", "Arguments that are null or an object written out as a string become an object. The peer hands them on."
)
BROKEN = Why(
    "either",
    "A call whose arguments are no JSON is told as one, so that the agent can answer it. The peer tells it as text.",
)
UNKNOWN = Why("we", "A call of an unknown tool is told as one, so that the agent can answer it. The peer drops it.")
BARE = Why(
    "either",
    "Where nothing but JSON marks a call, JSON that names no known tool is text. The peer takes it for a call.",
)
NAN = Why("we", "NaN is no JSON: the call has bad arguments. The peer makes it a string.")
TRIMMED = Why("we", "White space at the end of a tagged value belongs to the value. The peer strips it.")
SPACE_IN_VALUE = Why(
    "either", "White space that the template does not write around a value belongs to it. The peer strips it."
)
PYTHON = Why(
    "we",
    "Values may be written as Python does: some templates do so. The peer drops the call, or leaves a dict as text.",
)
DOUBLED = Why(
    "either",
    "A delimiter said twice is skipped where nothing else could be meant. The peer tells it as text or loses the call.",
)
LETTER_OF_TEMPLATE = Why(
    "we", "The peer knows one spelling, white space and order of headers included, and finds no call."
)
SECTION = Why("we", "There are two sections of calls. The peer reads the first.")
NOT_OPENED = Why(
    "we",
    "Nothing opened reasoning, neither prompt nor completion, so this is content. The peer takes it for reasoning.",
)
OPENED = Why(
    "we", "The prompt opened reasoning, so this is reasoning. The peer takes it for content as long as none is closed."
)
OPEN_REASONING = Why(
    "we", "A call's control token ends reasoning that was left open. The peer takes the call for reasoning."
)
AGAIN = Why(
    "we", "The model opens reasoning that the prompt opened already. The peer leaves the delimiter in the reasoning."
)
STOP_TOKEN = Why("we", "The stop token is no text. The peer leaves it in reasoning that nothing closed.")
HEADER = Why(
    "we",
    "Words in front of a lone `<|message|>` that no header has are content, as is what follows. The peer drops both.",
)
HEADERLESS = Why("we", "A completion without any header is content. The peer drops it.")
HALF_CHARACTER = Why(
    "either", "Half a character is told as one replacement character here, as one per byte by the peer."
)
LOST = Why("we", "The peer drops content in front of a call.")

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
                BEHIND,
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
            Difference(BEHIND, frozenset(LLAMA)),
        ),
        "a call twice": (Difference(LETTER_OF_TEMPLATE, frozenset({"gpt-oss"})),),
        "recipient behind the channel": (Difference(LETTER_OF_TEMPLATE, frozenset({"gpt-oss"})),),
        "unknown tool": (Difference(BARE, frozenset(LLAMA)),),
        "in reasoning": (Difference(OPENED, frozenset(NEMOTRON)),),
    },
    "vllm": {
        "text behind a call": (
            Difference(
                BEHIND,
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
