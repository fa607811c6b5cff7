"""`tokentape lock`: write a lockfile of a model's tokenization."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tokentape.audit._lock import make_lock, write_lock
from tokentape.cli.arguments import AsJson, TemplateFile, TemplateKwargs, json_object, model_folder, new_file
from tokentape.cli.output import print_json, working
from tokentape.store._location import refuse_output


def lock(
    path: Annotated[Path, model_folder("Model folder on this machine; nothing is downloaded.")],
    output: Annotated[Path, new_file("Lockfile to write.", "--output", "-o")] = Path("tokentape.lock"),
    chat_template: TemplateFile = None,
    kwargs: TemplateKwargs = "{}",
    as_json: AsJson = False,
) -> None:
    """Freeze how a model's tokenizer and chat template turn text and messages into ids.

    The lockfile contains the parts of the tokenizer, the template, its certificate, and the ids of test texts and
    conversations. Commit it, and run `tokentape check` in CI or when a trainer starts.
    """
    refuse_output(output, path, chat_template)
    with working("tokenizing"):
        lockfile = make_lock(path, chat_template=chat_template, template_kwargs=json_object(kwargs, "--kwargs"))
    write_lock(lockfile, output)
    refused = sum(golden.ids is None for golden in lockfile.goldens)
    if as_json:
        print_json(
            {
                "file": str(output),
                "goldens": len(lockfile.goldens),
                "refused": refused,
                "added_tokens": len(lockfile.components.added_tokens),
                "template_sha256": lockfile.components.template_sha256,
            }
        )
        return
    typer.echo(
        f"{output}: {len(lockfile.goldens)} golden inputs"
        + (f", {refused} of which the template refuses" if refused else "")
        + f"; {len(lockfile.components.added_tokens)} added tokens; template {lockfile.components.template_sha256[:16]}"
    )
