"""Brute force with plain `tokenizers` and transformers: in what two model folders differ.

It shares no code with the audit. What it finds is a fact with an input that shows it. What it does not find may still
be there: texts are infinite, and it tries the whole vocabulary, a corpus and texts made from the change. So it is truth
for "the audit missed a difference", and not for "the audit raised a false alarm": `harmless` is.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from tests.audit.mutator.files import CONFIG, GENERATION, TOKENIZER, Model
from tests.audit.mutator.texts import concatenations, corpus

FUNDAMENTAL = (KeyboardInterrupt, SystemExit, MemoryError)


@dataclass(frozen=True)
class Effect:
    """One kind of difference, with an input that shows it."""

    what: str
    """`refused`, `ids`, `special ids`, `unstable`, `cut or padded`, `text of ids`, `rendering`, `special tokens`,
    `stop ids`, `other ids of config`, `rows` or one by transformers alone: `auto ids`, `auto refused`."""
    shown: str

    def __str__(self) -> str:
        return f"{self.what}: {self.shown}"


class Refused(Exception):
    """A library does not take a file or an input."""


def attempt(call: Callable[[], Any]) -> Any:
    """Return the result of a call. Raises `Refused` for any error; Rust panics are not an `Exception`."""
    try:
        return call()
    except FUNDAMENTAL:
        raise
    except BaseException as error:
        raise Refused(f"{type(error).__name__}: {str(error)[:200]}") from None


def _try_apart(file: Path) -> None:
    """Load a file in another process. Raises `Refused` if the process is ended by it, as by a panic within a panic."""
    load = "import sys, tokenizers; tokenizers.Tokenizer.from_file(sys.argv[1])"
    code = subprocess.run([sys.executable, "-c", load, str(file)], capture_output=True, timeout=300).returncode
    if code < 0:
        raise Refused(f"the process ends with signal {-code}")


class View:
    """What plain `tokenizers` and transformers make of one model folder, with results cached."""

    def __init__(self, model: Model, folder: Path) -> None:
        self.model, self.folder = model, folder
        self._ids: dict[tuple[str, bool], list[int]] = {}

    @cached_property
    def as_loaded(self) -> tokenizers.Tokenizer:
        return self._loaded()

    def _loaded(self) -> tokenizers.Tokenizer:
        if attempt(lambda: self.model.docs[TOKENIZER]["model"].get("continuing_subword_prefix")):
            _try_apart(self.folder / TOKENIZER)
        return attempt(lambda: tokenizers.Tokenizer.from_file(str(self.folder / TOKENIZER)))

    @cached_property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer without truncation and padding."""
        made = self._loaded()
        made.no_truncation()
        made.no_padding()
        return made

    @cached_property
    def vocabulary(self) -> list[str]:
        """The text of every id."""
        count = 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        return self.decode([[token_id] for token_id in range(count)])

    @cached_property
    def texts(self) -> list[str]:
        """The vocabulary, the corpus and concatenations."""
        return list(dict.fromkeys([*self.vocabulary, *corpus(), *concatenations(self.vocabulary)]))

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        new = [text for text in dict.fromkeys(texts) if (text, special) not in self._ids]
        made = attempt(lambda: self.tokenizer.encode_batch_fast(new, add_special_tokens=special)) if new else []
        self._ids.update(((text, special), encoding.ids) for text, encoding in zip(new, made, strict=True))
        return [self._ids[text, special] for text in texts]

    def encode_anew(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        return [
            encoding.ids
            for encoding in attempt(lambda: self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=special))
        ]

    def decode(self, sequences: Sequence[Sequence[int]], *, skip: bool = False) -> list[str]:
        return attempt(lambda: self.tokenizer.decode_batch([list(ids) for ids in sequences], skip_special_tokens=skip))

    @cached_property
    def auto(self) -> Any:
        """The folder as transformers loads it."""
        from transformers import AutoTokenizer

        return attempt(lambda: AutoTokenizer.from_pretrained(str(self.folder), local_files_only=True))

    def auto_ids(self, text: str, *, special: bool = True) -> list[int]:
        return attempt(lambda: list(self.auto(text, add_special_tokens=special)["input_ids"]))

    def auto_text(self, ids: Sequence[int]) -> str:
        return attempt(lambda: self.auto.decode(list(ids)))

    def render(self, messages: Sequence[Any], tools: Sequence[Any], generate: bool, **kwargs: Any) -> str:
        """Return what transformers writes. Raises `Refused`."""
        return attempt(
            lambda: self.auto.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=generate,
                tokenize=False,
                **kwargs,
            )
        )

    @cached_property
    def renderings(self) -> dict[str, str]:
        """What the template writes for each conversation. All errors count as the same."""
        found = {}
        for name, messages, tools in conversations():
            for generate, kwargs in ((True, {}), (False, {}), (True, {"enable_thinking": False})):
                try:
                    text = self.render(messages, tools, generate, **kwargs)
                except Refused:
                    text = "\0refused"
                found[f"{name}, {generate}, {kwargs}"] = text
        return found


def effects(a: View, b: View, extra: Sequence[str] = ()) -> list[Effect]:
    """Return how two folders differ, a kind of difference once. `extra` are texts about the change."""
    try:
        a.tokenizer.get_vocab_size()
        b.tokenizer.get_vocab_size()
    except Refused as error:
        return [Effect("refused", str(error))]
    found: dict[str, Effect] = {}
    refused = {"refused": (_of_ids(a, b, extra), _of_configs(a, b)), "auto refused": (_of_transformers(a, b, extra),)}
    for what, parts in refused.items():
        for part in parts:
            try:
                for effect in part:
                    found.setdefault(effect.what, effect)
            except Refused as error:
                found.setdefault(what, Effect(what, str(error)))
    return list(found.values())


def _of_ids(a: View, b: View, extra: Sequence[str]) -> Iterator[Effect]:
    if a.model.docs.get(TOKENIZER) is b.model.docs.get(TOKENIZER):
        return
    texts = list(dict.fromkeys([*extra, *a.texts, *b.vocabulary]))
    ours, theirs = a.encode(texts), b.encode(texts)
    unlike = [(text, left, right) for text, left, right in zip(texts, ours, theirs, strict=True) if left != right]
    if unlike:
        text, our_ids, their_ids = min(unlike, key=lambda each: len(each[0]))
        yield Effect("ids", f"{len(unlike)} of {len(texts)} texts, {text!r}: {our_ids[:12]} and {their_ids[:12]}")
    few = [text for text in texts if len(text) > 3][:: max(1, len(texts) // 2000)]
    if b.encode_anew(few) != b.encode_anew(few):
        yield Effect("unstable", "the same texts have other ids the second time")
        return
    some = [*extra[:50], *corpus()[:20], "", "a", "a b"]
    for text, our_ids, their_ids in zip(some, a.encode(some, special=True), b.encode(some, special=True), strict=True):
        if our_ids != their_ids and a.encode([text]) == b.encode([text]):
            yield Effect("special ids", f"{text!r}: {our_ids[:12]} and {their_ids[:12]}")
            break
    yield from _of_lengths(a, b)
    yield from _of_decoding(a, b, [ids for ids in ours[:: max(1, len(ours) // 3000)] if ids])


def _of_lengths(a: View, b: View) -> Iterator[Effect]:
    texts = ["a b", " ".join(corpus()[:15])]
    ours, theirs = (
        [encoding.ids for encoding in view.as_loaded.encode_batch(texts, add_special_tokens=False)] for view in (a, b)
    )
    whole = a.encode(texts) == b.encode(texts)
    if whole and ours != theirs:
        yield Effect("cut or padded", f"{list(map(len, ours))} and {list(map(len, theirs))} ids")


def _of_decoding(a: View, b: View, sequences: Sequence[Sequence[int]]) -> Iterator[Effect]:
    id_lists = [[token_id] for token_id in range(min(len(a.vocabulary), len(b.vocabulary)))] + list(sequences)
    for skip in (False, True):
        both = zip(id_lists, a.decode(id_lists, skip=skip), b.decode(id_lists, skip=skip), strict=True)
        unlike = [(ids, left, right) for ids, left, right in both if left != right]
        if unlike:
            ids, ours, theirs = min(unlike, key=lambda each: len(each[0]))
            yield Effect("text of ids", f"{list(ids)[:12]}: {ours[:60]!r} and {theirs[:60]!r}, special skipped: {skip}")
            return


def _of_configs(a: View, b: View) -> Iterator[Effect]:
    for file in (GENERATION, CONFIG):
        ours, theirs = (view.model.docs.get(file) or {} for view in (a, b))
        left, right = _id_set(ours.get("eos_token_id")), _id_set(theirs.get("eos_token_id"))
        repeated = file == CONFIG and frozenset() in (left, right) and _end_ids(a) == _end_ids(b)
        if left != right and not repeated:
            yield Effect("stop ids", f"{file}: {sorted(left)} and {sorted(right)}")
        for key in ("bos_token_id", "pad_token_id"):
            if None not in (ours.get(key), theirs.get(key)) and ours[key] != theirs[key]:
                yield Effect("other ids of config", f"{file} {key}: {ours[key]} and {theirs[key]}")
    rows = [_rows(view.model.docs) for view in (a, b)]
    lacking = [n is not None and len(view.vocabulary) > n for view, n in zip((a, b), rows, strict=True)]
    if lacking[0] != lacking[1]:
        yield Effect("rows", f"{rows[0]} and {rows[1]} for {len(a.vocabulary)} and {len(b.vocabulary)} ids")


def _end_ids(view: View) -> frozenset[Any]:
    files = (view.model.docs.get(file) or {} for file in (CONFIG, GENERATION))
    return frozenset(token_id for doc in files for token_id in _id_set(doc.get("eos_token_id")))


def _id_set(value: Any) -> frozenset[Any]:
    if isinstance(value, list):
        return frozenset(json.dumps(token_id) for token_id in value)
    return frozenset() if value is None else frozenset([json.dumps(value)])


def _rows(docs: Mapping[str, Any]) -> int | None:
    config = docs.get(CONFIG) or {}
    nested = config.get("text_config")
    rows = config.get("vocab_size", nested.get("vocab_size") if isinstance(nested, Mapping) else None)
    return rows if isinstance(rows, int) and not isinstance(rows, bool) else None


def _of_transformers(a: View, b: View, extra: Sequence[str]) -> Iterator[Effect]:
    """What transformers makes of the other files; what tokenizer.json alone changes is found by ids."""
    changed = [file for file in {*a.model.docs, *b.model.docs} if a.model.docs.get(file) != b.model.docs.get(file)]
    if changed == [TOKENIZER]:
        return
    for name in ("bos_token", "eos_token", "pad_token"):
        left, right = (view.auto.special_tokens_map.get(name) for view in (a, b))
        if left != right and (name != "pad_token" or None not in (left, right)):  # who only serves needs no padding
            yield Effect("special tokens", f"{name}: {left!r} and {right!r}")
    unlike = [name for name, text in a.renderings.items() if b.renderings[name] != text]
    if unlike:
        name = unlike[0]
        yield Effect("rendering", f"{len(unlike)} of {len(a.renderings)}, {name}")
    if TOKENIZER in changed:
        return
    texts = [*extra[:50], *corpus()[:60], *a.renderings.values()]
    for text in texts:
        left, right = (view.auto_ids(text) for view in (a, b))
        if left != right:
            yield Effect("auto ids", f"{text[:60]!r}: {left[:12]} and {right[:12]}")
            break
    for text in texts:
        ids = a.encode([text])[0]
        left, right = (view.auto_text(ids) for view in (a, b))
        if left != right:
            yield Effect("text of ids", f"by transformers: {left[:60]!r} and {right[:60]!r}")
            break


def conversations() -> list[tuple[str, list[Any], list[Any]]]:
    """Return conversations with their names and tools. They cover the cases that templates commonly distinguish."""
    tool = {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Find a fact",
            "parameters": {
                "type": "object",
                "properties": {"key": {"type": "string"}, "n": {"type": "integer"}},
                "required": ["key"],
            },
        },
    }
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "look_up", "arguments": {"key": "ü", "n": 2}}}
    user, more = {"role": "user", "content": "  Is it so?\n"}, {"role": "user", "content": "And now?"}
    reply, system = {"role": "assistant", "content": " Yes.\n"}, {"role": "system", "content": "Be brief. "}
    thought = {"role": "assistant", "content": "No.", "reasoning_content": "Let me see."}
    inline = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nMaybe."}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    two = {"role": "assistant", "content": "Both:", "tool_calls": [call, {**call, "id": "abcdefgh2"}]}
    result = {"role": "tool", "content": "42", "name": "look_up", "tool_call_id": "abcdefgh1"}
    second = {**result, "content": '{"a": 1}', "tool_call_id": "abcdefgh2"}
    parts = {"role": "user", "content": [{"type": "text", "text": "Part"}, {"type": "text", "text": " two"}]}
    plain: dict[str, list[Any]] = {
        "user": [user],
        "system": [system, user],
        "turns": [user, reply, more],
        "three turns": [system, user, reply, more, thought, user],
        "reasoning": [user, thought],
        "reasoning before": [user, inline, more, thought, user],
        "answer": [user, reply],
        "parts": [parts],
        "calls": [user, calls, result],
        "two calls": [system, user, two, result, second, reply, more],
        "call last": [user, calls],
        "empty": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}, user],
    }
    cases = [(name, messages, []) for name, messages in plain.items()]
    return cases + [(f"{name} with tools", messages, [tool]) for name, messages in plain.items()]
