"""`tokentape premium`: what languages and scripts cost in tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokentape.cli.arguments import AsJson, refuse_no_folder
from tokentape.cli.readable import readable

if TYPE_CHECKING:
    from tokentape.audit.premium import Premium

_CORPUS_HELP = (
    "Text files, one language each and named for it (de.txt), JSON lines with text and language, or folders of these; "
    "several times for several."
)


def premium(
    paths: Annotated[list[Path], typer.Argument(metavar="TOKENIZER", help="Model folders with tokenizer.json.")],
    corpus: Annotated[list[Path], typer.Option(metavar="FILE", exists=True, help=_CORPUS_HELP)],
    baseline: Annotated[
        str | None, typer.Option(metavar="LANGUAGE", help="Give each language's tokens over this one's: translations.")
    ] = None,
    lines: Annotated[int | None, typer.Option(min=1, help="Read at most this many lines of each file.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write a report as one HTML file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Count tokens per character and per byte of your texts, by language and by script.

    Several tokenizers are compared on the same texts. Texts are tokenized by themselves, without a chat template.
    """
    for path in paths:
        refuse_no_folder(path, "TOKENIZER")

    from rich.console import Console

    from tokentape.audit.premium import measure, page, read_corpus
    from tokentape.chat.tokenizer import Tokenizer
    from tokentape.errors import InvalidRequest

    names = [path.resolve().name for path in paths]
    tokenizers = {
        name if names.count(name) == 1 else str(path): Tokenizer.load(path)
        for name, path in zip(names, paths, strict=True)
    }
    with Console(stderr=True).status("tokenizing"):
        try:
            found = measure(tokenizers, read_corpus(corpus, lines), baseline=baseline)
        except InvalidRequest as error:
            raise typer.BadParameter(str(error), param_hint="--corpus") from None
    if as_json:
        rows = {"languages": found.languages, "scripts": found.scripts}
        written = {key: [row.to_dict() for row in each] for key, each in rows.items()}
        typer.echo(json.dumps({"baseline": found.baseline, **written}, ensure_ascii=False))
    else:
        _print(found, tokenizers)
    if html is not None:
        html.write_text(page(found), encoding="utf-8")


def _print(found: Premium, tokenizers: Iterable[str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tokentape.audit.premium import columns

    console = Console(highlight=False)
    for tokenizer in tokenizers:
        console.print(Text(readable(tokenizer), style="bold"))
        for what, each in (("language", found.languages), ("script", found.scripts)):
            head, body = columns([row for row in each if row.tokenizer == tokenizer], what)
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for at, name in enumerate(head):
                table.add_column(name, justify="right" if at else "left")
            for row in body:
                table.add_row(*(Text(readable(cell)) for cell in row))
            console.print(table)
