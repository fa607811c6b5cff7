"""`tokentape export`: write trajectories to a file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from shlex import quote
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from tokentape._durable import durable_file
from tokentape._session.arrow import write_parquet
from tokentape._session.atif import atif_document
from tokentape._session.jsonl import write_jsonl
from tokentape._session.lineage import check_roles
from tokentape._session.verdict import check_verdicts
from tokentape.cli.arguments import AsJson, StoreLocation, flag, new_file, option
from tokentape.cli.output import end, working
from tokentape.errors import InvalidRequest
from tokentape.store import Store, StoredSession, open_record
from tokentape.store._location import refuse_output
from tokentape.store._reads import ExportCounts, exported
from tokentape.types import Trajectory

if TYPE_CHECKING:
    from tokentape.training._samples import Sample

Trainer: TypeAlias = Literal[
    "verl", "slime", "miles", "skyrl", "nemo-rl", "prime-rl", "tinker", "agent-lightning", "trl"
]
Format: TypeAlias = Literal["parquet", "jsonl", "atif", Trainer]


def export(
    location: StoreLocation,
    output: Annotated[Path, new_file("File to write.", "-o", "--output")],
    file_format: Annotated[
        Format | None,
        option(
            "Default: jsonl for a file named .jsonl, else parquet. A trainer's name: rows for this trainer, as JSON "
            "lines, or as Parquet in a file named .parquet. atif: Harbor's trajectory format, a document per line.",
            None,
            "--format",
        ),
    ] = None,
    group: Annotated[
        str | None, option("For a trainer: the key of the sessions' metadata that names their group.", "KEY")
    ] = None,
    session: Annotated[list[str] | None, option("Only this session; may be repeated.", "ID")] = None,
    verdict: Annotated[
        str | None,
        option(
            "Only these verdicts, separated by commas: exact, forked, forked:WHY, closed, captured, captured with "
            "drift. List a reservation to include branches that have it: 'exact,model unverified'.",
            "LIST",
        ),
    ] = None,
    wait_checks: Annotated[
        bool,
        flag("Wait until the running gateway has checked all pending bridges, or has checked none for a minute."),
    ] = False,
    unread: Annotated[bool, flag("Include turns whose client disconnected before it had the whole reply.")] = False,
    roles: Annotated[
        str | None, option("Only branches with these roles, separated by commas: main, subagent, side_call.", "LIST")
    ] = None,
    skip_refused: Annotated[
        bool,
        flag(
            "For a trainer: leave out sessions that its format refuses or that lack the key of --group, and print "
            "which and why."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write trajectories to a file for a trainer.

    Writes one row per branch of a session, with the columns that clients attached and the arrays that engines returned
    per token. Can run while a gateway records. The file gets its name when it is complete. Exits with 3 if it is empty.

    In parquet and jsonl, --verdict and --roles don't change loss masks: if the branch that trains a turn is left out,
    no other row trains the turn. In ATIF and in a trainer's format, the first remaining row with the turn trains it.
    In a trainer's format a row is a sample, and all samples are kept in memory.
    """
    refuse_output(output)
    form = _format_of(output, file_format)
    for param, is_set in (("group", group is not None), ("skip_refused", skip_refused)):
        if is_set and form in _OWN_FORMATS:
            name = param.replace("_", "-")
            raise InvalidRequest(f"--{name} works only with a trainer format, such as --format verl", param)
    verdicts, role_names = _entries(verdict), _entries(roles)
    check_verdicts(verdicts or ())
    check_roles(role_names or ())
    counts = ExportCounts()
    refused: dict[str, str] = {}
    with open_record(location, read_only=True) as store, working("exporting") as status:
        now: StoredSession | None = None

        def with_progress() -> Iterator[StoredSession]:
            nonlocal now
            for number, now in enumerate(_sessions(store, session), 1):
                status.update(f"exporting session {number}")
                yield now

        def current() -> StoredSession:
            assert now is not None
            return now

        if wait_checks and (unchecked := _wait(store, session)):
            typer.echo(f"{unchecked} bridges are still unchecked: is the gateway running?", err=True)
        extra = store.extra_names(session or None)
        trajectories = exported(with_progress(), extra, verdicts, counts, unread=unread, store=store, roles=role_names)
        with durable_file(output) as file:
            if form == "jsonl":
                write_jsonl(trajectories, file)
            elif form == "parquet":
                write_parquet(trajectories, file, extra)
            elif form == "atif":
                counts.trained_tokens = _write_atif(trajectories, current, file)
            else:
                from tokentape.training._trainer_rows import write_trainer_rows

                with _advice(skip_refused):
                    samples, rows, refused = _for_trainer(form, trajectories, group, skip_refused=skip_refused)
                    write_trainer_rows(rows, file, parquet=output.suffix == ".parquet")
                counts = replace(
                    counts,
                    trajectories=len(samples),
                    tokens=sum(len(sample.token_ids) for sample in samples),
                    trained_tokens=sum(int(sample.loss_mask.sum()) for sample in samples),
                )
    if as_json:
        left_out = {"refused": refused} if skip_refused else {}
        typer.echo(json.dumps({"file": str(output), "format": form, **asdict(counts), **left_out}))
    else:
        _print_counts(output, counts, refused)
    if group is None and form in _GROUPED:
        typer.echo("without --group each session is its own group; for GRPO, pass --group METADATA_KEY", err=True)
    if counts.other_verdicts and not counts.trajectories:
        typer.echo(f"to export these: --verdict {quote(_filter_for(counts.other_verdicts))}", err=True)
    end(False, counts.trajectories, "trajectories; the file is empty")


_PATIENCE = 60.0

_OWN_FORMATS = ("parquet", "jsonl", "atif")
"""Formats of trajectories. The others are trainers' formats of samples."""

_GROUPED = ("verl", "slime", "miles", "skyrl", "nemo-rl")
"""Formats with a group name in each row."""

_SHOWN = 5
"""Largest number of refused sessions to print."""


def _format_of(output: Path, file_format: Format | None) -> Format:
    """Return the format to write. Raises `InvalidRequest` if the file's name says another one."""
    if file_format is None and output.suffix not in ("", ".jsonl", ".parquet"):
        raise InvalidRequest(f"{output} does not end with .jsonl or .parquet; rename it or pass --format", "output")
    form = file_format or ("jsonl" if output.suffix == ".jsonl" else "parquet")
    if (output.suffix, form) in ((".parquet", "jsonl"), (".parquet", "atif"), (".jsonl", "parquet")):
        written = "Parquet" if form == "parquet" else "JSON lines"
        raise InvalidRequest(
            f"--format {form} writes {written}, so its name must not end with {output.suffix}: rename {output}, "
            "or pass a different format",
            "output",
        )
    return form


def _write_atif(trajectories: Iterable[Trajectory], session: Callable[[], StoredSession], file: IO[bytes]) -> int:
    """Write a document per trajectory, and return the number of tokens with loss. `session` returns its session."""
    trained = 0
    for _, branches in groupby(trajectories, lambda trajectory: trajectory.session_id):
        earlier: set[int] = set()
        for trajectory in branches:
            document = atif_document(session().tree(), session().setups, trajectory, earlier)
            file.write(json.dumps(document, allow_nan=False).encode() + b"\n")
            trained += sum(end - start for turn, start, end in trajectory.completions() if turn not in earlier)
            earlier.update(trajectory.turns)
    return trained


def _print_counts(output: Path, counts: ExportCounts, refused: Mapping[str, str]) -> None:
    """Print on stderr what was exported, what was left out and why."""
    typer.echo(
        f"{output}: sessions {counts.sessions}, trajectories {counts.trajectories}, tokens {counts.tokens}, "
        f"with loss {counts.trained_tokens}",
        err=True,
    )
    for name, left_out in (("verdict", counts.other_verdicts), ("roles", counts.other_roles)):
        for value, many in left_out.items():
            typer.echo(f"left out by --{name}: {many} x {value!r}", err=True)
    for session_id, why in list(refused.items())[:_SHOWN]:
        typer.echo(f"left out by --skip-refused: session {session_id!r}: {why}", err=True)
    if refused:
        shown = f"; the first {_SHOWN} are shown, --json lists all" if len(refused) > _SHOWN else ""
        typer.echo(f"left out by --skip-refused: sessions {len(refused)} of {counts.sessions}{shown}", err=True)


def _entries(text: str | None) -> list[str] | None:
    """Split a list at its commas; return None if the option is not set."""
    return None if text is None else [entry.strip() for entry in text.split(",")]


def _grouped(trajectories: Iterable[Trajectory], group: str | None, refused: dict[str, str]) -> Iterator[Trajectory]:
    """Yield the trajectories that have a group. Add the reason for every other session to `refused`, by session id."""
    from tokentape.training._samples import group_name

    for trajectory in trajectories:
        try:
            group_name(trajectory, group)
        except InvalidRequest as error:
            refused[trajectory.session_id] = str(error)
        else:
            yield trajectory


def _for_trainer(
    trainer: str, trajectories: Iterable[Trajectory], group: str | None, *, skip_refused: bool
) -> tuple[Sequence[Sample], Iterable[dict[str, Any]], dict[str, str]]:
    """Return the samples and rows for a trainer, and why sessions were skipped, by session id."""
    from tokentape.training._samples import assemble
    from tokentape.training._trainer_rows import accepted_rows, iter_trainer_rows

    refused: dict[str, str] = {}
    if skip_refused:
        samples, rows, failures = accepted_rows(
            trainer, assemble(_grouped(trajectories, group, refused), group=group).samples
        )
        return samples, rows, refused | failures
    samples = assemble(trajectories, group=group).samples
    # A row takes many times the memory of its sample, so it is made when it is written.
    return samples, iter_trainer_rows(trainer, samples), refused


@contextmanager
def _advice(skip_refused: bool) -> Iterator[None]:
    """Add the option that leaves out refused sessions to errors about one."""
    try:
        yield
    except InvalidRequest as error:
        if skip_refused or error.param not in ("samples", "group"):
            raise
        raise InvalidRequest(f"{error}. Pass --skip-refused to leave out such sessions", error.param) from None


def _filter_for(verdicts: Iterable[str]) -> str:
    """Return the value of --verdict that selects these verdicts."""
    parts = [part for verdict in verdicts for part in verdict.replace(": ", ":").split(", ")]
    return ",".join(dict.fromkeys(parts))


def _wait(store: Store, session_ids: Sequence[str] | None) -> int:
    """Wait until no check is pending, or none was done for a minute. Return how many are still pending."""
    due, changed_at = store.checks_due(session_ids or None), time.monotonic()
    while due and time.monotonic() < changed_at + _PATIENCE:
        time.sleep(0.1)
        before, due = due, store.checks_due(session_ids or None)
        changed_at = time.monotonic() if due < before else changed_at
    return due


def _sessions(store: Store, session_ids: Sequence[str] | None) -> Iterator[StoredSession]:
    if not session_ids:
        return store.iter_sessions(per_token=True, together=True)
    return (store.load_session(session_id, per_token=True) for session_id in dict.fromkeys(session_ids))
