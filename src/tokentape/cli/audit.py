"""`tokentape audit`: whether two sides map the same text and messages to the same ids."""

from __future__ import annotations

from datetime import date as calendar_date
from pathlib import Path
from typing import Annotated

import typer

from tokentape.cli.arguments import AsJson, json_object
from tokentape.cli.output import print_json

_SIDE_HELP = (
    "A model folder or tokenizer file, or a server: json: auto: slow: spm: tiktoken: mistral: gguf: in front say how "
    "to load it, vllm: sglang: llamacpp: gateway: that it is a server, such as vllm:http://127.0.0.1:8000."
)


def audit(
    a: Annotated[str, typer.Argument(metavar="A", help=f"One side, usually that of training. {_SIDE_HELP}")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other side, usually that of serving, named the same way.")],
    corpus: Annotated[
        list[Path] | None,
        typer.Option(help="File or folder of text or JSON lines to encode too; may be given more than once."),
    ] = None,
    kwargs: Annotated[
        str, typer.Option(metavar="JSON", help="Template kwargs of both sides, such as '{\"enable_thinking\": false}'.")
    ] = "{}",
    kwargs_a: Annotated[str, typer.Option(metavar="JSON", help="Template kwargs of side A alone.")] = "{}",
    kwargs_b: Annotated[str, typer.Option(metavar="JSON", help="Template kwargs of side B alone.")] = "{}",
    template_a: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Chat template for side A instead of its own.")
    ] = None,
    template_b: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Chat template for side B instead of its own.")
    ] = None,
    date: Annotated[
        str | None, typer.Option(metavar="YYYY-MM-DD", help="What templates are shown as today, where it can be set.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="TOKENTAPE_ENGINE_API_KEY", help="What the server wants as API key.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that encode the corpus; by default one per core.")
    ] = None,
    html: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the report to this file too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether two sides give the same ids, and if not, by what cause and on which smallest input.

    Texts, control tokens, BOS and EOS, decoding, chat templates and loss masks are tried out on both. Exits with 0 if
    they agree, 1 if they don't. Nothing is downloaded, and no code from model folders is run.
    """
    both = json_object(kwargs, "--kwargs")
    given_a = {**both, **json_object(kwargs_a, "--kwargs-a")}
    given_b = {**both, **json_object(kwargs_b, "--kwargs-b")}
    if date is not None:
        try:
            calendar_date.fromisoformat(date)
        except ValueError:
            raise typer.BadParameter(
                f"expected a date such as 2026-11-21, found {date!r}", param_hint="--date"
            ) from None

    from rich.console import Console

    from tokentape.audit.skew.auditor import audit as audit_sides
    from tokentape.audit.skew.backends.spec import BackendOptions
    from tokentape.audit.skew.report_text import audit_layout
    from tokentape.errors import InvalidRequest

    with Console(stderr=True).status("") as status:
        try:
            report = audit_sides(
                a,
                b,
                corpus=corpus or (),
                options_a=BackendOptions(template_a, given_a, date, api_key),
                options_b=BackendOptions(template_b, given_b, date, api_key),
                workers=workers,
                progress=status.update,
            )
        except InvalidRequest as error:
            raise typer.BadParameter(str(error)) from None
    if as_json:
        print_json(report.to_dict())
    else:
        audit_layout(report).print()
    if html is not None:
        html.write_text(audit_layout(report).html(), encoding="utf-8")
    raise typer.Exit(1 if report.skewed else 0)
