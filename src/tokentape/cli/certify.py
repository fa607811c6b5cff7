"""`tokentape certify`: test a model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tokentape.chat._certificate import REQUIRABLE
from tokentape.chat._certificate_cache import load_or_certify
from tokentape.chat._certification import certify as certify_anew
from tokentape.chat._renderer import Renderer
from tokentape.cli.arguments import AsJson, TemplateFile, TemplateKwargs, flag, json_object, model_folder, option
from tokentape.cli.certificate_report import certificate_layout
from tokentape.cli.output import working

_REQUIRE_HELP = (
    "Exit with 1 unless all of these are certified: continuations by their roles joined with +, such as "
    "user,tool,tools+user, and reasoning, calls, parallel, injection. What begins with a tool's result needs calls "
    "too. Names separated by commas."
)


def certify(
    path: Annotated[Path, model_folder("Model folder on this machine; nothing is downloaded.", "PATH")],
    chat_template: TemplateFile = None,
    strict_text: Annotated[
        bool,
        flag(
            "Keep every added token out of the text of callers, HTML tags too. Default: no, text is encoded as "
            "the tokenizer encodes it, and control tokens alone are kept out."
        ),
    ] = False,
    kwargs: TemplateKwargs = "{}",
    required: Annotated[str, option(_REQUIRE_HELP, "NAMES", "--require")] = "",
    cache: Annotated[bool, flag("Use the cached certificate of this machine.")] = True,
    as_json: AsJson = False,
) -> None:
    """Say what holds for a model's chat template.

    Renders conversations of a grammar to find out which bridges are exact, which turns are parsed back, and what the
    template drops. Certificates are cached under TOKENTAPE_CACHE or in the user's cache directory. A continuation is
    certified unless it is refused; `fork` is exact too, on a new branch.
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
            f"unknown: {', '.join(unknown)}. Known: {', '.join(REQUIRABLE)}", param_hint="--require"
        )
    return names
