"""`tokentape premium`: compare the token counts of languages and scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokentape.audit._premium import measure_premium, premium_layout, read_corpus
from tokentape.chat._tokenizer import Tokenizer
from tokentape.cli.arguments import AsJson, HtmlFile, model_folder, option
from tokentape.cli.output import print_report, working
from tokentape.errors import InvalidRequest, NothingToMeasure
from tokentape.store._location import refuse_output

_CORPUS_HELP = (
    "Text files in one language each, named after it (de.txt), JSON lines with text and language, or folders of "
    "these; may be repeated."
)


def premium(
    paths: Annotated[list[Path], model_folder("Model folders with tokenizer.json.", "TOKENIZER")],
    corpus: Annotated[list[Path], option(_CORPUS_HELP, "FILE", exists=True)],
    baseline: Annotated[
        str | None, option("For translated texts: divide each language's tokens by this language's.", "LANGUAGE")
    ] = None,
    lines: Annotated[int | None, option("Read at most this many lines of each file.", min=1)] = None,
    html: HtmlFile = None,
    as_json: AsJson = False,
) -> None:
    """Count tokens per character and per byte of your texts, by language and by script.

    Compares several tokenizers on the same texts. Texts are tokenized without a chat template.
    Exits with 3 if a file has no text.
    """
    refuse_output(html, *paths, *corpus)
    names = [path.resolve().name for path in paths]
    tokenizers = {
        name if names.count(name) == 1 else str(path): Tokenizer.load(path)
        for name, path in zip(names, paths, strict=True)
    }
    with working("tokenizing"):
        try:
            report = measure_premium(tokenizers, read_corpus(corpus, lines), baseline=baseline)
        except NothingToMeasure:
            raise
        except InvalidRequest as error:
            raise typer.BadParameter(str(error), param_hint="--corpus") from None
    print_report(premium_layout(report), html, report if as_json else None)
