"""`tokentape verify`: check a record."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from tokentape.cli.arguments import AsJson, StoreLocation, existing_file, flag, new_file
from tokentape.cli.output import end, print_json, working
from tokentape.store._head import read_head
from tokentape.store._location import refuse_output
from tokentape.store._verify import verify as check


def verify(
    store: StoreLocation,
    head_out: Annotated[Path | None, new_file("Write a head of the record to this file.")] = None,
    sign: Annotated[Path | None, existing_file("Sign it: Ed25519 private key, PEM file.", "KEY")] = None,
    against: Annotated[Path | None, existing_file("Find what was changed since this head.", "HEAD")] = None,
    public_key: Annotated[
        Path | None, existing_file("Refuse a head not signed by this key: public, PEM file.", "KEY")
    ] = None,
    nothing_added: Annotated[
        bool, flag("Sessions or parts added since the head are findings too.", "--nothing-added")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Re-check every hash and every rule of a record, and compare it with an earlier head of it.

    Exits with 1 if anything is wrong, 3 if there are no sessions. Changes nothing, and may run beside a gateway.

    Without a head, verify does not find deleted sessions, missing newest turns, digests that were computed anew, and
    changes of rewards, columns, events or metadata that keep their form. A head has digests of all of these: keep it
    where those who can write to the record can not write. With it, verify names what was deleted, changed, moved, or
    inserted before something older. What was added later is only counted, for nothing shows who added it.

    An unsigned head proves nothing by itself: whoever can replace it can make one of a changed record. Compare its
    digest with one that you wrote down elsewhere, or sign it.
    """
    if sign and not head_out:
        raise typer.BadParameter("needs --head-out.", param_hint="--sign")
    if (public_key or nothing_added) and not against:
        raise typer.BadParameter("needs --against.", param_hint="--public-key" if public_key else "--nothing-added")
    refuse_output(head_out, against, public_key)
    head = None if against is None else read_head(against, public_key)
    with working("checking every hash and rule"):
        report = check(store, against=head, nothing_added=nothing_added, head_out=head_out, sign=sign)
    if as_json:
        print_json({"ok": report.ok, **asdict(report)})
        end(not report.ok, report.sessions, _NONE)
    for finding in report.findings:
        typer.echo(str(finding))
    typer.echo(
        f"sessions {report.sessions}, turns {report.turns}, tokens {report.tokens}: findings {len(report.findings)}"
    )
    if head is not None and report.added is not None:
        created = datetime.fromtimestamp(head.created_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        signed = "its signature is right" if public_key else "its signature was not checked"
        typer.echo(f"compared with head {head.digest} of {created}; {signed}")
        typer.echo(f"added since: {', '.join(f'{part} {n}' for part, n in report.added.items() if n) or 'nothing'}")
    if head_out is not None:
        typer.echo(f"head {report.head}" if report.head else f"{head_out} was not written: the record has findings")
    end(not report.ok, report.sessions, _NONE)


_NONE = "sessions were recorded here"
