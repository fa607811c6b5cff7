"""`tokentape certify`: test a model's chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from tokentape.audit._report import Block, Facts, Heading, Paragraph, Report, Table
from tokentape.audit._report import escape_for_terminal as readable
from tokentape.chat._certificate import REQUIRABLE, Certificate, Continuation
from tokentape.chat._certificate_cache import load_or_certify
from tokentape.chat._certification import certify as certify_anew
from tokentape.chat._grammar import NO_SYSTEM, NO_TOOLS
from tokentape.chat._renderer import Renderer
from tokentape.cli.arguments import AsJson, TemplateFile, TemplateKwargs, flag, json_object, model_folder, option
from tokentape.cli.output import working
from tokentape.types import Message

_REQUIRE_HELP = (
    "Exit with 1 unless all of these are certified, separated by commas: continuations, named by their roles joined "
    "with +, such as user,tool,tools+user; and reasoning, calls, parallel, injection. A continuation that begins with "
    "a tool result also requires calls."
)


def certify(
    path: Annotated[Path, model_folder("Model folder on this machine; nothing is downloaded.", "PATH")],
    chat_template: TemplateFile = None,
    strict_text: Annotated[
        bool,
        flag(
            "Keep every added token, also HTML tags, out of callers' text. By default only control tokens are kept "
            "out, and other text is encoded as the tokenizer encodes it."
        ),
    ] = False,
    kwargs: TemplateKwargs = "{}",
    required: Annotated[str, option(_REQUIRE_HELP, "NAMES", "--require")] = "",
    cache: Annotated[bool, flag("Use the certificate cached on this machine.")] = True,
    as_json: AsJson = False,
) -> None:
    """Test what a model's chat template supports.

    Renders generated conversations to find out which bridges (the ids appended after a turn) are exact, which turns
    are parsed back, and what the template drops. Certificates are cached under TOKENTAPE_CACHE or in the user's cache
    directory. A continuation is certified unless it is refused; `fork` is exact too, on a new branch.
    """
    template_kwargs = json_object(kwargs, "--kwargs")

    names = _names(required)
    with working("loading the tokenizer") as status:
        renderer = Renderer.load(path, chat_template, strict_text=strict_text)
        status.update("trying out conversations")
        certificate = (load_or_certify if cache else certify_anew)(renderer, template_kwargs)
    if as_json:
        typer.echo(certificate.to_json())
    else:
        certificate_layout(certificate, renderer.template.sha256).print()
    shortfalls = list(certificate.shortfalls(names))
    for line in shortfalls:
        typer.echo(f"not certified: {line}", err=True)
    raise typer.Exit(1 if shortfalls else 0)


def _names(text: str) -> Sequence[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in REQUIRABLE]
    if unknown:
        raise typer.BadParameter(
            f"unknown name {', '.join(unknown)}; choose from {', '.join(REQUIRABLE)}", param_hint="--require"
        )
    return names


STRATEGIES = {
    "local": "the ids after a turn depend only on the new messages, and so does their cost",
    "contextual": "they depend on the history too, but are only appended: it is rendered again, its ids stay",
    "fork": "the template moves or repeats earlier text: such a turn starts a new branch, the old one is kept",
    "refused": "the template does not accept it: such a request is answered with status 422",
}
"""The meaning of each bridge strategy."""

_TEXT_SHOWN = 60


def certificate_layout(certificate: Certificate, template_sha256: str) -> Report:
    """Return the report of a certificate, with the smallest conversations for which the template rewrites history."""
    return Report(f"Certificate {certificate.fingerprint[:16]}", list(_blocks(certificate, template_sha256)))


def _blocks(certificate: Certificate, template_sha256: str) -> Iterator[Block]:
    yield Facts(_header(certificate, template_sha256))
    shown = _worth_showing(certificate.continuations)
    notes = list(dict.fromkeys(continuation.reason for continuation in shown if continuation.reason))
    yield Heading("Continuations")
    rows = []
    for continuation in shown:
        append_only = "" if continuation.strategy == "refused" else continuation.append_only
        note = f"[{notes.index(continuation.reason) + 1}]" if continuation.reason else ""
        rows.append([continuation.name, continuation.strategy, append_only, continuation.tried, note])
    yield Table(["new messages", "strategy", "append-only", "tried", "note"], rows, {3})
    yield Facts(_legend(shown))
    if len(shown) < len(certificate.continuations):
        without = f"Without tools ({NO_TOOLS}), or system text either ({NO_TOOLS}{NO_SYSTEM}): as with, unless listed."
        yield Paragraph(f"\n{without}")
    for number, note in enumerate(notes, 1):
        cases = [continuation for continuation in shown if continuation.reason == note]
        smallest = min(cases, key=lambda case: len(case.counterexample))
        yield Paragraph(f"\n{readable(f'[{number}] {note}')}")
        if smallest.counterexample:
            yield Paragraph(f"    {smallest.name}, the smallest conversation tried:")
        for message in smallest.counterexample:
            yield from (Paragraph(readable(f"    {message['role']:<10} {part}")) for part in _parts(message))
    yield Heading("Assistant turns parsed from what the template writes for them")
    answers = {True: "yes", False: "no", None: "not written"}
    parsing = [[check.name, answers[check.holds], check.detail] for check in certificate.parsing]
    yield Table(["turn", "comes back", "why not"], parsing)
    yield Heading("Silently left out by the template")
    yield from (Paragraph(f"  {what}") for what in certificate.dropped or ("nothing that was tried",))


def _header(certificate: Certificate, template_sha256: str) -> dict[str, object]:
    ends = dict.fromkeys(end for continuation in certificate.continuations for end in continuation.ends)
    other_stops = "" if set(certificate.stop_tokens) <= set(ends) else _OTHER_STOPS
    rows: dict[str, object] = {
        "fingerprint": certificate.fingerprint[:16],
        "template": template_sha256[:16],
        "template kwargs": json.dumps(certificate.template_kwargs, ensure_ascii=False),
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(certificate.versions.items())),
        "overrides": certificate.overrides or "none: all is read off the template",
        "generation prompt": _quoted(certificate.generation_prompt),
        "stop tokens": "  ".join(certificate.stop_tokens),
        "turns end with": "  ".join(ends) + other_stops,
        "reasoning": _reasoning(certificate),
        "tool calls": f"{certificate.call_style} style" if certificate.call_style else "not written by this template",
        "date": "printed by the template: frozen per session" if certificate.date_dependent else "not printed",
        "control tokens": (
            f"{len(certificate.control_tokens)}, which stay text where callers spell them"
            if certificate.injection_safe
            else "CAN BE FORGED by text of callers"
        ),
        "text tokens": _text_tokens(certificate.text_tokens),
    }
    if certificate.replaced_ids:
        token, declared, used = certificate.replaced_ids[0]
        rows["other ids"] = (
            f"{len(certificate.replaced_ids)} tokens do not have the id that tokenizer.json declares: {token!r} has "
            f"{used}, declared is {declared}. Check that the server uses the same ids."
        )
    return rows


_OTHER_STOPS = "; after another stop token the branch goes on, or a new one begins (stop_mismatch)"


def _text_tokens(tokens: Sequence[str]) -> str:
    """Return a line about the added tokens that callers' text can be encoded to."""
    if not tokens:
        return "none: every added token is a control token"
    shown = "  ".join(json.dumps(token, ensure_ascii=False) for token in tokens[:8])
    rest = f"  and {len(tokens) - 8} more" if len(tokens) > 8 else ""
    return f"{shown}{rest}; encoded as text, as the tokenizer does (--strict-text keeps them apart)"


def _reasoning(certificate: Certificate) -> str:
    if certificate.reasoning is None:
        return "not written by this template"
    opened = ", opened by the generation prompt" if certificate.reasoning_opened_by_prompt else ""
    return " to ".join(map(_quoted, certificate.reasoning)) + opened


def _worth_showing(continuations: Sequence[Continuation]) -> list[Continuation]:
    """Leave out continuations without tools or system message that have the same result as with them."""

    def result(continuation: Continuation) -> tuple[str, str, str]:
        return continuation.strategy, continuation.append_only, continuation.reason

    by_name = {continuation.name: continuation for continuation in continuations}
    shown = []
    for continuation in continuations:
        suffix = NO_SYSTEM if NO_SYSTEM in continuation.name else NO_TOOLS
        wider = by_name.get(continuation.name.removesuffix(suffix), continuation)
        if wider is continuation or result(continuation) != result(wider):
            shown.append(continuation)
    return shown


def _legend(shown: Sequence[Continuation]) -> dict[str, object]:
    used = {continuation.strategy for continuation in shown}
    rows: dict[str, object] = {name: meaning for name, meaning in STRATEGIES.items() if name in used}
    rows["append-only"] = "whether the template itself keeps the ids of what came before; the bridges always do"
    if any(continuation.append_only == "clean text" for continuation in shown):
        rows["clean text"] = "except after a turn that is empty or has white space at its ends"
    return rows


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


def _quoted(text: str) -> str:
    return _shortened(json.dumps(text, ensure_ascii=False))


def _shortened(text: str) -> str:
    return text if len(text) <= _TEXT_SHOWN else f"{text[: _TEXT_SHOWN - 1]}…"
