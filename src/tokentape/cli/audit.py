"""`tokentape audit`: compare two backends on the same text and messages."""

from __future__ import annotations

from datetime import date as calendar_date
from pathlib import Path
from typing import Annotated

import typer

from tokentape.audit._report import ci_report
from tokentape.audit._skew.auditor import audit as audit_sides
from tokentape.audit._skew.backends import BackendOptions
from tokentape.audit._skew.findings import RULES, audit_cases, audit_layout
from tokentape.cli.arguments import AsJson, CiFormat, EngineKey, HtmlFile, existing_file, json_object, option
from tokentape.cli.output import end, print_report, working
from tokentape.errors import InvalidRequest, NothingToMeasure
from tokentape.store._location import refuse_output

_SIDE_HELP = (
    "A model folder, a tokenizer file or a server. A prefix names the loader (json: auto: slow: spm: tiktoken: "
    "mistral: gguf:) or the server (vllm: sglang: llamacpp: gateway:), such as vllm:http://127.0.0.1:8000."
)


def audit(
    a: Annotated[str, typer.Argument(metavar="A", help=f"One side, usually that of training. {_SIDE_HELP}")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other side, usually that of serving, in the same format.")],
    corpus: Annotated[
        list[Path] | None, option("File or folder of text or JSON lines to encode too; may be repeated.")
    ] = None,
    kwargs: Annotated[
        str, option("Template kwargs of both sides, such as '{\"enable_thinking\": false}'.", "JSON")
    ] = "{}",
    kwargs_a: Annotated[str, option("Template kwargs for side A only.", "JSON")] = "{}",
    kwargs_b: Annotated[str, option("Template kwargs for side B only.", "JSON")] = "{}",
    template_a: Annotated[Path | None, existing_file("Chat template for side A instead of its own.")] = None,
    template_b: Annotated[Path | None, existing_file("Chat template for side B instead of its own.")] = None,
    date: Annotated[str | None, option("Date that templates get as today, where it can be set.", "YYYY-MM-DD")] = None,
    api_key: EngineKey = None,
    workers: Annotated[int | None, option("Processes that encode the corpus; by default one per core.", min=1)] = None,
    html: HtmlFile = None,
    file_format: CiFormat = "text",
    as_json: AsJson = False,
) -> None:
    """Check that two sides produce the same ids; if not, name the cause and the smallest input that shows it.

    Compares texts, control tokens, BOS and EOS, decoding, chat templates and loss masks. Exits with 0 if both sides
    agree, 1 if they don't, 3 if nothing could be compared. Downloads nothing and runs no code from model folders.
    """
    both = json_object(kwargs, "--kwargs")
    kwargs_of_a = {**both, **json_object(kwargs_a, "--kwargs-a")}
    kwargs_of_b = {**both, **json_object(kwargs_b, "--kwargs-b")}
    if date is not None:
        try:
            calendar_date.fromisoformat(date)
        except ValueError:
            raise typer.BadParameter(
                f"expected a date such as 2026-11-21, found {date!r}", param_hint="--date"
            ) from None

    sides = [part for side in (a, b) for part in (side, side.partition(":")[2])]
    refuse_output(html, *sides, *(corpus or ()), template_a, template_b)
    with working("") as status:
        try:
            report = audit_sides(
                a,
                b,
                corpus=corpus or (),
                options_a=BackendOptions(template_a, kwargs_of_a, date, api_key),
                options_b=BackendOptions(template_b, kwargs_of_b, date, api_key),
                workers=workers,
                progress=status.update,
            )
        except NothingToMeasure:
            raise
        except InvalidRequest as error:
            raise typer.BadParameter(str(error)) from None
    ci = None if file_format == "text" else ci_report(file_format, "tokentape audit", b, RULES, audit_cases(report))
    print_report(audit_layout(report), html, report.to_dict() if as_json else None, ci)
    end(report.skewed, sum(report.tried.values()), "input that both sides accept")
