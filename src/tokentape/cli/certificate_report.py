"""A certificate for people: 80 columns are enough, with colour or without.

Everything that a template wrote or said goes through `readable`: a template is somebody else's, and must not steer the
terminal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tokentape.audit.report import escape_for_terminal as readable
from tokentape.chat.certificate import Certificate, Continuation
from tokentape.chat.grammar import NO_SYSTEM, NO_TOOLS
from tokentape.types import Message

STRATEGIES = {
    "local": "what follows a turn depends on the new messages only, and so does its cost",
    "contextual": "it depends on the history too, but only appends: the history is rendered again, the ids stay",
    "fork": "the template moves or repeats what was said before: such a turn starts a new branch, the old one is kept",
    "refused": "the template does not take it: a request like that is answered with status 422",
}
"""What each bridge strategy means, in one line."""

_STYLES = {
    "local": "green",
    "contextual": "yellow",
    "fork": "yellow",
    "refused": "red",
    "yes": "green",
    "clean text": "yellow",
    "no": "red",
    "not written": "dim",
}
_TEXT_SHOWN = 60


def print_certificate(certificate: Certificate, template_sha256: str, console: Console | None = None) -> None:
    """Print what was found, what is dropped, and the smallest conversations where the template rewrites history."""
    console = console or Console(highlight=False)
    console.print(_header(certificate, template_sha256))
    shown, hidden = _worth_showing(certificate.continuations)
    notes = list(dict.fromkeys(found.reason for found in shown if found.reason))
    _print_title(console, "Continuations")
    console.print(_continuations(shown, notes))
    console.print(_legend(shown))
    if hidden:
        console.print(
            Text(
                f"\nWithout tools ({NO_TOOLS}), or system text either ({NO_TOOLS}{NO_SYSTEM}): as with, unless listed."
            )
        )
    for number, note in enumerate(notes, 1):
        _print_note(console, number, note, [found for found in shown if found.reason == note])
    _print_title(console, "Assistant turns parsed from what the template writes for them")
    console.print(_parsing(certificate))
    _print_title(console, "Silently left out by the template")
    for what in certificate.dropped or ("nothing that was tried",):
        console.print(Text(f"  {what}"))


def _header(certificate: Certificate, template_sha256: str) -> Table:
    table = _two_columns()
    rows = {
        "fingerprint": certificate.fingerprint[:16],
        "template": template_sha256[:16],
        "template kwargs": json.dumps(certificate.template_kwargs, ensure_ascii=False),
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(certificate.versions.items())),
        "overrides": certificate.overrides or "none: all is read off the template",
        "generation prompt": _quoted(certificate.generation_prompt),
        "stop tokens": "  ".join(certificate.stop_tokens),
        "turns end with": _ends(certificate),
        "reasoning": _reasoning(certificate),
        "tool calls": f"{certificate.call_style} style" if certificate.call_style else "not written by this template",
        "date": "printed by the template: frozen per session" if certificate.date_dependent else "not printed",
        "control tokens": (
            f"{len(certificate.control_tokens)}, which stay text where callers spell them"
            if certificate.injection_safe
            else "CAN BE FORGED by text of callers"
        ),
        "text tokens": _text_tokens(certificate),
    }
    if certificate.replaced_ids:
        token, declared, used = certificate.replaced_ids[0]
        rows["other ids"] = (
            f"{len(certificate.replaced_ids)} tokens do not have the id that tokenizer.json declares: {token!r} has "
            f"{used}, declared is {declared}. Check that the server uses the same ids."
        )
    for name, value in rows.items():
        table.add_row(name, Text(readable(value)))
    return table


def _ends(certificate: Certificate) -> str:
    own = "  ".join(dict.fromkeys(end for found in certificate.continuations for end in found.ends))
    others = set(certificate.stop_tokens) - {end for found in certificate.continuations for end in found.ends}
    return own + ("; behind another stop token the branch goes on, or a new one begins (wrong_stop)" if others else "")


def _text_tokens(certificate: Certificate) -> str:
    """Name the added tokens that callers' text becomes."""
    if not certificate.text_tokens:
        return "none: every added token is a control token"
    shown = "  ".join(json.dumps(token, ensure_ascii=False) for token in certificate.text_tokens[:8])
    more = f"  and {len(certificate.text_tokens) - 8} more" if len(certificate.text_tokens) > 8 else ""
    return f"{shown}{more}; encoded as text, as the tokenizer does (--strict-text keeps them apart)"


def _reasoning(certificate: Certificate) -> str:
    if certificate.reasoning is None:
        return "not written by this template"
    opening, closing = map(_quoted, certificate.reasoning)
    return f"{opening} to {closing}" + (
        ", opened by the generation prompt" if certificate.reasoning_opened_by_prompt else ""
    )


def _worth_showing(continuations: Sequence[Continuation]) -> tuple[list[Continuation], int]:
    """All but those for conversations that lack something where the result is the same; and how many these are."""
    by_name = {found.name: found for found in continuations}
    shown = []
    for found in continuations:
        wider = by_name.get(found.name.removesuffix(NO_SYSTEM if NO_SYSTEM in found.name else NO_TOOLS), found)
        if wider is found or _result(found) != _result(wider):
            shown.append(found)
    return shown, len(continuations) - len(shown)


def _result(found: Continuation) -> tuple[str, str, str]:
    return found.strategy, found.append_only, found.reason


def _continuations(shown: Sequence[Continuation], notes: Sequence[str]) -> Table:
    table = _table("new messages", "strategy", "append-only", "tried", "note")
    for found in shown:
        append_only = "" if found.strategy == "refused" else found.append_only
        note = f"[{notes.index(found.reason) + 1}]" if found.reason else ""
        table.add_row(found.name, _styled(found.strategy), _styled(append_only), str(found.tried), Text(note))
    return table


def _legend(shown: Sequence[Continuation]) -> Table:
    table = _two_columns()
    for strategy, meaning in STRATEGIES.items():
        if any(found.strategy == strategy for found in shown):
            table.add_row(strategy, meaning)
    table.add_row("append-only", "whether the template itself keeps the ids of what came before; the bridges always do")
    if any(found.append_only == "clean text" for found in shown):
        table.add_row("clean text", "except after a turn that is empty or has white space at its ends")
    return table


def _print_note(console: Console, number: int, reason: str, several: Sequence[Continuation]) -> None:
    smallest = min(several, key=lambda found: len(found.counterexample))
    console.print()
    console.print(Text(readable(f"[{number}] {reason}")))
    if smallest.counterexample:
        console.print(Text(f"    {smallest.name}, the smallest conversation tried:"))
    for message in smallest.counterexample:
        for part in _parts(message):
            console.print(Text(f"    {message['role']:<10} {part}"), soft_wrap=True)


def _parts(message: Message) -> list[str]:
    parts = []
    if message.get("reasoning_content"):
        parts.append(f"(reasoning) {_quoted(message['reasoning_content'])}")
    if message.get("content") or not message.get("tool_calls"):
        parts.append(_quoted(message.get("content") or ""))
    for call in message.get("tool_calls") or ():
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        parts.append(f"(call) {call['function']['name']} {_shortened(arguments)}")
    return parts


def _parsing(certificate: Certificate) -> Table:
    table = _table("turn", "comes back", "why not")
    for check in certificate.parsing:
        held = "not written" if check.holds is None else "yes" if check.holds else "no"
        table.add_row(check.name, _styled(held), Text(readable(check.detail)))
    return table


def _print_title(console: Console, title: str) -> None:
    console.print()
    console.print(Text(title, style="bold"))


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns[:-1]:
        table.add_column(column, no_wrap=True, justify="right" if column == "tried" else "left")
    table.add_column(columns[-1])
    return table


def _two_columns() -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    return table


def _styled(word: str) -> Text:
    return Text(word, style=_STYLES.get(word, ""))


def _quoted(text: str) -> str:
    return _shortened(json.dumps(text, ensure_ascii=False))


def _shortened(text: str) -> str:
    return text if len(text) <= _TEXT_SHOWN else f"{text[: _TEXT_SHOWN - 1]}…"
