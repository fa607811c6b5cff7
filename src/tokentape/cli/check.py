"""`tokentape check`: compare a model or a running server with a lockfile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tokentape.audit._lock import LockReport, examine, examine_server, read_lock
from tokentape.audit._lock.comparing import RULES, lock_cases, lock_layout
from tokentape.audit._report import ci_report
from tokentape.audit._report import escape_for_terminal as readable
from tokentape.cli import arguments as arg
from tokentape.cli.output import end, print_report, working
from tokentape.errors import InvalidRequest
from tokentape.store._location import refuse_output


def check(
    lockfile: Annotated[Path, typer.Argument(metavar="LOCKFILE", exists=True, dir_okay=False)],
    path: Annotated[Path | None, arg.model_folder("Model folder to compare.")] = None,
    engine: Annotated[str | None, arg.option("Running server or gateway to compare.", "URL")] = None,
    kind: Annotated[
        Literal["vllm", "sglang", "llamacpp", "gateway"] | None,
        arg.option("vllm, sglang, llamacpp or gateway. Default: detected.", "KIND"),
    ] = None,
    model_name: Annotated[
        str | None, arg.option("Name of the model on the server. Default: the first that it lists.", "NAME")
    ] = None,
    api_key: arg.EngineKey = None,
    chat_template: arg.TemplateFile = None,
    kwargs: Annotated[
        str | None, arg.option("Template kwargs in use. Default: the lock's.", "JSON", "--kwargs")
    ] = None,
    strict: Annotated[bool, arg.flag("Also fail if library versions or files changed but ids did not.")] = False,
    html: arg.HtmlFile = None,
    file_format: arg.CiFormat = "text",
    as_json: arg.AsJson = False,
) -> None:
    """Report what changed since a lockfile was created. Exits with 1 if anything changed, 3 if nothing was compared.

    Reports the changed part of the tokenizer or template, the first input with different ids, the expected and actual
    ids, and a likely cause. A changed library version is reported, but is a failure only if ids changed.
    """
    if path is None and engine is None:
        raise typer.BadParameter("pass a model folder, a server with --engine URL, or both", param_hint="MODEL")
    template_kwargs = None if kwargs is None else arg.json_object(kwargs, "--kwargs")

    refuse_output(html, lockfile, path, chat_template)
    try:
        lock = read_lock(lockfile)
    except InvalidRequest as error:
        raise typer.BadParameter(str(error), param_hint="LOCKFILE") from None
    reports: list[LockReport] = []
    with working("tokenizing") as status:
        if path is not None:
            reports.append(examine(lock, path, template_kwargs, chat_template, strict=strict))
        if engine is not None:
            status.update("asking the server")
            server = {"kind": kind, "model": model_name, "api_key": api_key}
            reports.append(examine_server(lock, engine, template_kwargs, strict=strict, **server))
    ok = all(report.ok for report in reports)
    if file_format == "text":
        text = "\n".join(readable(line) for report in reports for line in str(report).splitlines())
    else:
        cases = [case for report in reports for case in lock_cases(report)]
        text = ci_report(file_format, "tokentape check", str(lockfile), RULES, cases)
    value = {"ok": ok, "reports": reports} if as_json else None
    print_report(lock_layout(str(lockfile), reports), html, value, text)
    end(not ok, sum(report.inputs for report in reports), "golden input")
