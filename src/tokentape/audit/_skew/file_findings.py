"""Find differences in files that no input showed: parts of tokenizer.json, tokens, templates, configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import jinja2
from jinja2.idtracking import find_symbols

from tokentape.audit._model_files import CONFIG, CONFIG_FILES, MAX_LENGTH, ROWS, SAMPLED, changed_entries
from tokentape.audit._skew.backends import Ability, Backend, BackendFacts
from tokentape.audit._skew.causes import SAME_FILES, TextCauses
from tokentape.audit._skew.findings import Severity, Skew, SkewResult
from tokentape.audit._skew.parts import PARTS, TABLES, Spec, added_words, differing_tokens, part_of, table_words
from tokentape.audit._skew.probing import result
from tokentape.chat._generation_blocks import without_tags
from tokentape.chat._template import parse_template

_TRAINED = "Use the file that the weights were trained with on both sides."
_PAD_FIX = "Use a separate padding token: if it is EOS, masks made from it leave the ends of turns untrained."
_ROWS_FIX = "Use the weights' own config.json. If the embedding was resized, every token needs a row."
_SURPLUS_FIX = "Never sample them: mask their logits, and check sampled ids."
_ABILITY: Mapping[str, Ability] = {"post_processor": "special"}
_SIDES = "AB"
_FILE = "tokenizer.json"
_END = re.compile(r"[ .]eos_token_id$")


def file_findings(
    a: Backend, b: Backend, causes: TextCauses, earlier: Collection[Skew], *, templates: bool = True
) -> list[Skew]:
    """Return findings on tokenizer.json, special tokens and (with `templates`) templates that `earlier` lacks."""
    kinds, known_causes = {finding.kind for finding in earlier}, " ".join(finding.cause for finding in earlier)
    tables = _tables(a.facts, b.facts, causes.differing)
    unknown = [(finding, tokens) for finding, tokens in tables if finding.cause not in known_causes]
    new = [
        _shown(finding, tokens, a, b)
        for finding, tokens in unknown
        if finding.kind != "vocabulary" or finding.kind not in kinds
    ]
    new += _special_tokens(a.facts, b.facts)
    cleans = a.facts.cleans_up, b.facts.cleans_up
    if None not in cleans and cleans[0] != cleans[1] and "decode clean-up" not in kinds:
        cause = f"clean_up_tokenization_spaces is {cleans[0]} in A and {cleans[1]} in B"
        severity: Severity = "skew"
        if all("decode" in side.facts.abilities for side in (a, b)):
            # transformers 5 ignores it for BPE, and versions 4 do not.
            cause, severity = f"{cause}; both decode the tried ids alike, but other versions may not", "caution"
        fix = "Set it to false in tokenizer_config.json."
        new.append(Skew("decode clean-up", "facts", cause, fix, 1, severity=severity))
    skews = {finding.kind for finding in (*earlier, *new) if finding.severity == "skew"}
    for part in causes.differing:
        # If a side lacks the ability, no input tested the part, and the difference may be harmless.
        able = all(_ABILITY.get(part, "decode") in side.facts.abilities for side in (a, b))
        if able and PARTS[part] not in skews:
            cause = f"{causes.words(part)}; no tried input shows it"
            new.append(Skew(PARTS[part], "facts", cause, _TRAINED, 1))
    # A finding that names no table may come from one of them.
    named = {table_words(name, a.facts, b.facts) for name in causes.tables}
    seen = any(finding.severity == "skew" and finding.cause not in named for finding in earlier)
    unseen = "" if seen else "; no tried input shows it"
    for name in causes.tables:
        if (cause := table_words(name, a.facts, b.facts)) not in known_causes:
            new.append(Skew(TABLES[name], "facts", f"{cause}{unseen}", _TRAINED, 1))
    if templates and not any(finding.probe == "render" and finding.severity == "skew" for finding in earlier):
        new += _templates(a.facts, b.facts)
    return new


def file_notes(a: BackendFacts, b: BackendFacts, findings: Collection[Skew]) -> list[str]:
    """Return each side's notes, and notes on versions and vocabulary sizes that differ without a finding."""
    notes = [f"{letter}: {note}" for letter, side in zip(_SIDES, (a, b), strict=True) for note in side.notes]
    for library, (a_version, b_version) in changed_entries(a.versions, b.versions).items():
        if a_version is not None and b_version is not None:
            notes.append(f"{library} is {a_version} in A and {b_version} in B")
    sizes = a.vocab_size, b.vocab_size
    if None not in sizes and sizes[0] != sizes[1] and "vocabulary" not in {finding.kind for finding in findings}:
        notes.append(f"ids end at {sizes[0]} in A and at {sizes[1]} in B")
    return notes


def _tables(a: BackendFacts, b: BackendFacts, differing: Collection[str]) -> Iterator[tuple[Skew, Sequence[str]]]:
    """Yield findings on added tokens and vocabularies, each with the tokens that differ."""
    specs_known = a.spec is not None and b.spec is not None
    for difference, tokens in differing_tokens(a, b).items():
        if not specs_known and (difference != "ids" or (a.tables and b.tables)):
            continue  # the flags are unknown, a library may list fewer tokens, and tables are compared as such
        # Converters set `special` on tokens that look like control tokens: ids stay equal, decoding hides them.
        marked = a.kind != b.kind and difference.startswith("special=") and "," not in difference
        severity: Severity = "caution" if marked else "skew"
        if not specs_known and "render" in a.abilities & b.abilities:
            severity = "caution"  # the renderings, which were compared, show those that matter
        finding = Skew("added token", "facts", added_words(tokens, a, b), SAME_FILES, len(tokens), severity=severity)
        if difference.startswith("special="):
            ids, token = (a.added[tokens[0]].id,), tokens[0]
            # Decoding may skip the token on a side where it is special.
            shown = [SkewResult(ids, (token,), "" if side.added[token].special else token) for side in (a, b)]
            finding = replace(finding, example=ids, a=shown[0], b=shown[1])
        yield finding, tokens
    if "vocabulary" in differing and a.spec is not None and b.spec is not None:
        added = {**a.added, **b.added}
        changed = [token for token in changed_entries(_ids(a.spec), _ids(b.spec)) if token not in added]
        if changed:
            difference = f"{len(changed)} tokens have different ids or are on one side only, first {changed[0]!r}"
            cause = f"the vocabularies differ: {difference}"
            yield Skew("vocabulary", "facts", cause, SAME_FILES, len(changed)), changed


def _shown(finding: Skew, tokens: Sequence[str], a: Backend, b: Backend) -> Skew:
    """Add an example to a finding: a token that the sides encode differently, or an id that they decode differently."""
    if finding.example is not None or a.facts.spec is None or b.facts.spec is None:
        return finding
    texts = tokens if finding.kind == "added token" else ()
    for text, a_ids, b_ids in zip(texts, a.encode(texts), b.encode(texts), strict=True):
        if a_ids != b_ids:
            return replace(finding, example=text, a=result(a, a_ids), b=result(b, b_ids))
    if not all("decode" in side.facts.abilities for side in (a, b)):
        return finding
    tables = [_ids(spec) for spec in (a.facts.spec, b.facts.spec)]
    ids = {table[token] for table in tables for token in tokens if token in table}
    sequences = [(token_id,) for token_id in sorted(ids & {*tables[0].values()} & {*tables[1].values()})]
    for example, a_text, b_text in zip(sequences, a.decode(sequences), b.decode(sequences), strict=True):
        if a_text != b_text:
            return replace(finding, example=example, a=result(a, example, a_text), b=result(b, example, b_text))
    return finding


def _ids(spec: Spec) -> dict[str, int]:
    vocab = part_of(spec, "vocabulary")
    return dict(vocab) if isinstance(vocab, Mapping) else {entry[0]: number for number, entry in enumerate(vocab)}


def _special_tokens(a: BackendFacts, b: BackendFacts) -> Iterator[Skew]:
    same_loader = a.kind == b.kind and all(CONFIG in side.files or "GGUF" in side.kind for side in (a, b))
    if not same_loader and (not a.special_tokens or not b.special_tokens):
        return
    for name, pair in changed_entries(a.special_tokens, b.special_tokens).items():
        if name != "pad_token" and None in pair and not same_loader:
            continue  # a loader may name fewer tokens; if a template uses them, its renderings differ
        cause = f"{name} is {pair[0] or 'not set'} in A and {pair[1] or 'not set'} in B"
        if name != "pad_token":
            yield Skew("special tokens", "facts", cause, "Set it to the same token on both sides.", 1)
            continue
        sides = zip(_SIDES, (a, b), pair, strict=True)
        ends = [letter for letter, side, pad in sides if pad and pad == side.special_tokens.get("eos_token")]
        cause += f"; it is the EOS token in {' and '.join(ends)}" if ends else ""
        if ends or None not in pair:  # a side that only serves needs no padding
            yield Skew("padding", "facts", cause, _PAD_FIX if ends else SAME_FILES, 1)
    pad = a.special_tokens.get("pad_token")
    if pad and pad == a.special_tokens.get("eos_token") and b.special_tokens.get("pad_token") == pad:
        yield Skew("padding", "facts", f"both sides pad with {pad}, their EOS token", _PAD_FIX, 1, severity="caution")


def _templates(a: BackendFacts, b: BackendFacts) -> Iterator[Skew]:
    pairs = {"chat template": (a.template, b.template)}
    if a.tool_template or b.tool_template:
        pairs["template for tools"] = a.tool_template or a.template, b.tool_template or b.template
    if a.templates is not None and b.templates is not None:
        pairs |= {
            f"chat template named {name}": pair for name, pair in changed_entries(a.templates, b.templates).items()
        }
    for name, (a_template, b_template) in pairs.items():
        if a_template is not None and b_template is not None:
            if not same_template(a_template, b_template):
                cause = f"the {name} differs between A and B; no tried conversation shows it"
                yield Skew("template", "facts", cause, _TRAINED, 1)
        elif a_template is not None or b_template is not None:
            lacking, has, lacks = (b, "A", "B") if b_template is None else (a, "B", "A")
            if lacking.loading is not None or lacking.kind.startswith(("AutoTokenizer", "GGUF")):
                yield Skew("template", "facts", f"{has} has a {name} and {lacks} has none", _TRAINED, 1)


def same_template(a: str, b: str) -> bool:
    """Return True if two templates differ at most in comments and `{% generation %}` tags."""
    try:
        # `repr`, because jinja2's nodes are equal if they write True and 1, or 1 and 1.0.
        return a == b or (repr(_program(a)) == repr(_program(b)) and _scopes(a) == _scopes(b))
    except jinja2.TemplateError:
        return False


def _scopes(source: str) -> list[str]:
    """Return the `{% generation %}` blocks that set names, which are not set after the block."""
    scopes = parse_template(source).find_all(jinja2.nodes.Scope)
    return [repr(scope) for scope in scopes if find_symbols(scope.body).stores]


def _program(source: str) -> jinja2.nodes.Template:
    tree = parse_template(without_tags(source))
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
    """Return findings on ids and embedding rows in config files, maximum lengths, truncation and padding."""
    return [*_configured(a, b), *_rows(a, b), *_lengths(a, b)]


def _configured(a: BackendFacts, b: BackendFacts) -> Iterator[Skew]:
    if a.configuration is None or b.configuration is None:
        return
    for key, (a_value, b_value) in changed_entries(a.configuration, b.configuration).items():
        if key == ROWS:
            continue
        ends = bool(_END.search(key))
        if ends and None in (a_value, b_value) and _end_ids(a) == _end_ids(b):
            continue
        ends |= key.endswith(" stop_strings")
        are_ids = all(map(_is_number, (*(a_value or ()), *(b_value or ()))))
        if ends or key.endswith(SAMPLED) or " forced_" in key or None not in (a_value, b_value) or not are_ids:
            cause = f"{key} is {_listed(a_value)} in A and {_listed(b_value)} in B" + (
                ": turns end at different tokens" if ends else ""
            )
            yield Skew("stop ids" if ends else "special tokens", "facts", cause, _TRAINED, 1)


def _end_ids(side: BackendFacts) -> tuple[Any, set[str]]:
    """Return the ids at which transformers ends turns, and those of all files, at which some servers end them."""
    configuration = side.configuration or {}
    used = [configuration.get(f"{name} eos_token_id") for name in CONFIG_FILES]
    listed = [ids for key, ids in configuration.items() if _END.search(key)]
    # transformers reads config.json only if there is no generation_config.json.
    return used[CONFIG_FILES[1] in side.files], {str(number) for ids in listed for number in ids}


def _listed(value: Any) -> str:
    return "not set" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _rows(a: BackendFacts, b: BackendFacts) -> Iterator[Skew]:
    """Yield findings on tokens without an embedding row, and on rows without a token, which an engine can sample."""
    lacking: list[str] = []
    surplus: dict[str, list[str]] = {}
    for letter, side in zip(_SIDES, (a, b), strict=True):
        rows, size = (side.configuration or {}).get(ROWS), side.vocab_size
        if not _is_number(rows) or size is None or rows == size:
            continue
        if rows > size:
            surplus.setdefault(f"ids {size} to {rows - 1}", []).append(letter)
            continue
        tokens = [token.content for token in side.added.values() if token.id >= rows][:3]
        names = f" ({', '.join(map(repr, tokens))}...)" if tokens else ""
        lacking.append(f"ids {rows} to {size - 1}{names} have no embedding row in {letter}")
    if lacking:
        same = len(lacking) == 2 and ROWS not in changed_entries(a.configuration or {}, b.configuration or {})
        severity: Severity = "caution" if same else "skew"
        yield Skew("embedding rows", "facts", f"{'; '.join(lacking)}, by {ROWS}", _ROWS_FIX, 1, severity=severity)
    if surplus:
        ids = "; ".join(f"{which} have embedding rows in {' and '.join(who)}" for which, who in surplus.items())
        yield Skew("embedding rows", "facts", f"{ids}, but no token", _SURPLUS_FIX, 1, severity="caution")


def _is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _lengths(a: BackendFacts, b: BackendFacts) -> Iterator[Skew]:
    """Yield findings on the length at which transformers truncates, and on truncation and padding in tokenizer.json."""
    if a.max_length != b.max_length and all(CONFIG in side.files for side in (a, b)):
        lengths = f"{_listed(a.max_length)} in A and {_listed(b.max_length)} in B"
        cause = f"{MAX_LENGTH} is {lengths}: transformers cuts texts there if truncation is enabled"
        yield Skew("truncation", "facts", cause, _TRAINED, 1, severity="caution")
    files = {letter: side.spec or {} for letter, side in zip(_SIDES, (a, b), strict=True) if side.kind == _FILE}
    for name in ("truncation", "padding"):
        parts = [spec.get(name) or None for spec in files.values()]
        if not any(parts) or (len(parts) == 2 and parts[0] == parts[1]):
            continue
        texts = (json.dumps(part, ensure_ascii=False) if part else "none" for part in parts)
        shown = " and ".join(f"{text} in {letter}" for letter, text in zip(files, texts, strict=True))
        severity: Severity = "skew" if len(parts) == 2 else "caution"
        cause = f"{name} in {_FILE} is {shown}: `tokenizers` applies it to every text"
        if severity == "caution":
            cause += ", transformers and servers don't"
        yield Skew("truncation", "facts", cause, f"Remove `{name}` from {_FILE}.", 1, severity=severity)
