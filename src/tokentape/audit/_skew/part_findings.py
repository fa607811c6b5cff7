"""Differences of files that no input shows: parts, templates, stop ids, rows of the embedding, truncation."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeGuard

import jinja2

from tokentape.audit._model_config import ROWS
from tokentape.audit._skew.backends.base import Ability, Backend, BackendFacts
from tokentape.audit._skew.backends.spec import without_marks
from tokentape.audit._skew.causes import TextCauses, unlike_tokens
from tokentape.audit._skew.findings import Skew, SkewResult
from tokentape.audit._skew.part_texts import token_texts
from tokentape.audit._skew.probing import result
from tokentape.audit._skew.spec_parts import PARTS
from tokentape.chat._template import parse_template

_TRAINED = "Use the file that the weights were trained with on both sides."
_ABILITY: Mapping[str, Ability] = {"post_processor": "special"}
_UNSEEN = "no input that was tried shows it"


def part_findings(
    a: Backend, b: Backend, causes: TextCauses, found: Collection[Skew], *, templates: bool = True
) -> list[Skew]:
    """Return parts of tokenizer.json, and `templates`, that differ and are in none of the findings yet."""
    kinds = {one.kind for one in found if one.severity == "skew"}
    findings = [
        Skew(PARTS[part], "facts", f"{causes.words(part)}; {_UNSEEN}", _TRAINED, 1)
        for part in causes.differing
        if PARTS[part] not in kinds
        and all(_ABILITY.get(part, "decode") in side.facts.abilities for side in (a, b))  # else it was not to be tried
    ]
    if templates and not any(one.probe == "render" and one.severity == "skew" for one in found):
        findings += _templates(a.facts, b.facts)
    return findings


def added_token_texts(a: BackendFacts, b: BackendFacts) -> list[str]:
    """Return texts about the added tokens in which two backends differ."""
    return [text for tokens in unlike_tokens(a, b).values() for text in token_texts(tokens[0])]


def _templates(a: BackendFacts, b: BackendFacts) -> Iterator[Skew]:
    pairs = {"chat template": (a.template, b.template), "template for tools": (a.tool_template, b.tool_template)}
    if a.templates is not None and b.templates is not None:
        named = sorted({*a.templates, *b.templates})
        pairs |= {f"chat template named {name}": (a.templates.get(name), b.templates.get(name)) for name in named}
    for name, (one, other) in pairs.items():
        if name == "template for tools":
            one, other = (one or a.template, other or b.template) if one or other else (None, None)
        if one is None and other is None:
            continue
        if one is None or other is None:
            if not _may_have_template(a if one is None else b):
                continue
            cause = f"{'A' if other is None else 'B'} has a {name} and {'B' if other is None else 'A'} has none"
        elif _same_template(one, other):
            continue
        else:
            cause = f"the {name} is another text in A and B; no conversation that was tried shows it"
        yield Skew("template", "facts", cause, _TRAINED, 1)


def _may_have_template(facts: BackendFacts) -> bool:
    return facts.loading is not None or facts.kind.startswith(("AutoTokenizer", "GGUF"))


def _same_template(one: str, other: str) -> bool:
    """Return True if two templates are the same program: they differ in comments and marks of loss at most."""
    if one == other:
        return True
    try:
        return _program(one) == _program(other)
    except jinja2.TemplateError:
        return False


def _program(source: str) -> jinja2.nodes.Template:
    tree = parse_template(without_marks(source))
    for output in tree.find_all(jinja2.nodes.Output):
        joined: list[jinja2.nodes.Expr] = []
        for node in output.nodes:
            if isinstance(node, jinja2.nodes.TemplateData):
                if joined and isinstance(joined[-1], jinja2.nodes.TemplateData):
                    joined[-1] = jinja2.nodes.TemplateData(joined[-1].data + node.data)
                elif node.data:
                    joined.append(jinja2.nodes.TemplateData(node.data))
            else:
                joined.append(node)
        output.nodes = joined
    return tree


def configuration_findings(a: BackendFacts, b: BackendFacts) -> list[Skew]:
    """Return differences of config.json, generation_config.json, and of truncation and padding in tokenizer.json."""
    return [*_ids(a, b), *_rows(a, b), *_surplus(a, b), *_lengths(a, b)]


def _ids(a: BackendFacts, b: BackendFacts) -> Iterator[Skew]:
    if a.configuration is None or b.configuration is None:
        return
    for key in sorted({*a.configuration, *b.configuration} - {ROWS}):
        one, other = a.configuration.get(key), b.configuration.get(key)
        ends = key.endswith((" eos_token_id", " stop_strings"))
        are_ids = all(_is_number(i) for i in (*(one or ()), *(other or ())))
        if one == other or (key.endswith("_token_id") and not ends and None in (one, other) and are_ids):
            continue
        cause = f"{key} is {_listed(one)} in A and {_listed(other)} in B" + (": turns end elsewhere" if ends else "")
        yield Skew("stop ids" if ends else "special tokens", "facts", cause, _TRAINED, 1)


def _listed(ids: Any) -> str:
    return "not set" if ids is None else ", ".join(map(str, ids))


def _rows(a: BackendFacts, b: BackendFacts) -> Iterator[Skew]:
    lacking = {}
    for letter, side in (("A", a), ("B", b)):
        rows = (side.configuration or {}).get(ROWS)
        if _is_number(rows) and side.vocab_size is not None and rows < side.vocab_size:
            tokens = [token.content for token in side.added.values() if token.id >= rows][:3]
            named = f" ({', '.join(map(repr, tokens))}...)" if tokens else ""
            lacking[letter] = f"ids {rows} to {side.vocab_size - 1}{named} have no row in the embedding of {letter}"
    if lacking:
        severity = "caution" if len(lacking) == 2 and a.configuration == b.configuration else "skew"
        cause = f"{'; '.join(lacking.values())}, by {ROWS}"
        fix = "Use the config.json of the weights. If they were resized, give every token a row."
        yield Skew("embedding rows", "facts", cause, fix, 1, severity=severity)  # type: ignore[arg-type]


def _surplus(a: BackendFacts, b: BackendFacts) -> Iterator[Skew]:
    """Yield a caution about rows of the embedding without a token, which an engine can sample."""
    said: dict[str, list[str]] = {}
    for letter, side in (("A", a), ("B", b)):
        rows = (side.configuration or {}).get(ROWS)
        if _is_number(rows) and side.vocab_size is not None and rows > side.vocab_size:
            said.setdefault(f"ids {side.vocab_size} to {rows - 1}", []).append(letter)
    if said:
        ids = "; ".join(f"{which} are rows of the embedding of {' and '.join(who)}" for which, who in said.items())
        fix = "Never sample them: mask their logits, and check sampled ids."
        yield Skew("embedding rows", "facts", f"{ids} without a token", fix, 1, severity="caution")


def _is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _lengths(a: BackendFacts, b: BackendFacts) -> Iterator[Skew]:
    """Yield truncation and padding of plain `tokenizers`, which transformers switches off."""
    if a.spec is None or b.spec is None or not a.kind == b.kind == "tokenizer.json":
        return
    for name in ("truncation", "padding"):
        one, other = a.spec.get(name), b.spec.get(name)
        if one != other:
            said = [json.dumps(part, ensure_ascii=False) if part else "none" for part in (one, other)]
            cause = (
                f"{name} in tokenizer.json is {said[0]} in A and {said[1]} in B: `tokenizers` applies it to every text"
            )
            yield Skew("truncation", "facts", cause, f"Remove `{name}` from tokenizer.json on both sides.", 1)


def unstable_finding(backend: Backend, letter: str, texts: Collection[str]) -> Skew | None:
    """Return a finding if a backend gives the same text other ids the second time, or says that it does."""
    dropout = ((backend.facts.spec or {}).get("model") or {}).get("dropout")
    tries = 20 if dropout else 1
    asked = list(texts)
    first = backend.encode(asked)
    shown: tuple[str, SkewResult, SkewResult] | None = None
    for _ in range(tries):
        again = backend.encode(asked)
        unlike = [(t, x, y) for t, x, y in zip(asked, first, again, strict=True) if x != y]
        if unlike:
            text, one, other = min(unlike, key=lambda each: len(each[0]))
            shown = text, result(backend, one), result(backend, other)
            break
    if shown is None and not dropout:
        return None
    what = f"{letter} disagrees with itself: it gives the same text other ids the second time"
    if dropout:
        kept = f"model.dropout is {dropout} in its tokenizer.json"
        cause, fix = (
            f"{what}, since {kept}",
            "Remove dropout from tokenizer.json; it is for training a tokenizer's model.",
        )
        return Skew("model settings", "encode", cause, fix, 1, (), *(shown or (None,)))
    fix = "Compare nothing with this side before it is deterministic."
    return Skew("unknown", "encode", what, fix, 1, (), *(shown or (None,)))
