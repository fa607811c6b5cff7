"""`tokentape verify`: check the hashes and invariants of a record."""

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
    sign: Annotated[Path | None, existing_file("Ed25519 private key (PEM) to sign the head with.", "KEY")] = None,
    against: Annotated[Path | None, existing_file("Find changes since this head.", "HEAD")] = None,
    public_key: Annotated[
        Path | None, existing_file("Public key (PEM); refuse a head that it did not sign.", "KEY")
    ] = None,
    nothing_added: Annotated[
        bool, flag("Treat everything added since the head as a finding.", "--nothing-added")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check every hash and invariant of a record, and compare it with a head that was saved earlier.

    Exits with 1 if anything is wrong, 3 if there are no sessions. It is read-only and can run while a gateway runs.

    Without a head, verify does not find some changes: deleted sessions, missing newest turns, changed turns with new
    digests, and valid changes to rewards, columns, events or metadata. A head is a file with digests of all of these.
    Keep it where those who write to the record can't change it. With a head, verify lists what was deleted, changed or
    moved since then, and what was inserted before entries that existed then. Entries that were appended later are only
    counted, because nothing shows who made them.

    An unsigned head proves nothing by itself: whoever can replace it can also create a head of a changed record. Sign
    it, or compare its digest with a copy of the digest that you keep elsewhere.
    """
    if sign and not head_out:
        raise typer.BadParameter("needs --head-out.", param_hint="--sign")
    if (public_key or nothing_added) and not against:
        raise typer.BadParameter("needs --against.", param_hint="--public-key" if public_key else "--nothing-added")
    refuse_output(head_out, against, public_key)
    head = None if against is None else read_head(against, public_key)
    with working("checking every hash and invariant"):
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
        signed = "its signature is valid" if public_key else "its signature was not checked"
        typer.echo(f"compared with head {head.digest} of {created}; {signed}")
        typer.echo(f"added since: {', '.join(f'{part} {n}' for part, n in report.added.items() if n) or 'nothing'}")
    if head_out is not None:
        typer.echo(f"head {report.head}" if report.head else f"{head_out} was not written: the record has findings")
    end(not report.ok, report.sessions, _NONE)


_NONE = "sessions were recorded here"
