"""Check that a trainer's data pipeline passes each sampled token to the loss unchanged.

Write a function that takes `Sample`s and yields the rows that your loss function gets, and run:

    python -m tokentape.testing.samples my_trainer.data:rows

The check calls your function with samples of golden sessions, and compares the rows with the sessions. Then it plants
errors in the rows, and checks that it finds each error. The exit code is 1 if a row is wrong or a planted error is not
found.

>>> def rows(samples):                                                              # doctest: +SKIP
...     for row in my_data_pipeline(samples):
...         yield Row(row.input_ids, row.loss_mask, row.old_logprobs, advantages=row.advantages)
>>> print(check_samples(rows))                                                      # doctest: +SKIP
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module

import numpy as np

from tokentape.errors import InvalidRequest
from tokentape.testing._planted import ERRORS
from tokentape.testing._rows import Row, RowFinding, findings, place
from tokentape.testing.golden import GOLDEN
from tokentape.training._samples import Sample, assemble
from tokentape.types import Trajectory

__all__ = ["ConformanceReport", "Row", "RowFinding", "check_samples", "findings", "golden_samples", "main"]


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """The results of `check_samples`. `str(report)` is a table."""

    goldens: dict[str, list[RowFinding]] = field(default_factory=dict)
    """Errors in the rows of each golden batch, by its name."""
    refused: dict[str, str] = field(default_factory=dict)
    """Golden batches that the pipeline was allowed to refuse and refused, with the error message."""
    planted: dict[str, dict[str, bool]] = field(default_factory=dict)
    """For each planted error: whether it was found, by golden batch. Batches that it does not change are left out."""
    not_given: tuple[str, ...] = ()
    """Fields of `Row` that are None in all rows."""

    @property
    def ok(self) -> bool:
        """Whether no golden batch has a finding and every planted error was found."""
        return not any(self.goldens.values()) and all(all(caught.values()) for caught in self.planted.values())

    def __str__(self) -> str:
        lines = []
        for name, row_findings in self.goldens.items():
            text = {finding.kind: finding.text for finding in reversed(row_findings)}
            numbers = Counter(finding.kind for finding in row_findings)
            shown = [f"{kind} ({number}): {text[kind]}" for kind, number in numbers.items()]
            shown = shown or [f"refused: {self.refused[name]}" if name in self.refused else "held"]
            lines += [f"{'' if n else name:34}{line}" for n, line in enumerate(shown)]
        for name, caught in self.planted.items():
            missed = [golden for golden, was_caught in caught.items() if not was_caught]
            tried = f"caught in {sum(caught.values())} of {len(caught)}" if caught else "not tried: changes nothing"
            lines.append(f"{name:34}{tried}" + (f", unnoticed in: {'; '.join(missed)}" if missed else ""))
        return "\n".join([*lines, f"{'not given, so not checked':34}{', '.join(self.not_given) or 'nothing'}"])


def golden_samples(paths: Sequence[Trajectory]) -> Sequence[Sample]:
    """Make samples with `assemble`, grouped by the metadata key `group`."""
    return assemble(paths, group="group").samples


def check_samples(
    adapter: Callable[[Sequence[Sample]], Iterable[Row]],
    *,
    samples: Callable[[Sequence[Trajectory]], Sequence[Sample]] = golden_samples,
) -> ConformanceReport:
    """Run a data pipeline on the golden sessions, then plant each error in its rows and check that it is found.

    `adapter` takes samples and returns rows. `samples` makes the samples from trajectories. An exception is a finding,
    unless it is an `InvalidRequest` for a golden batch that may be refused.
    """
    report = ConformanceReport(planted={error.name: {} for error in ERRORS})
    names = [field.name for field in fields(Row)]
    present: set[str] = set()
    for golden in GOLDEN:
        try:
            trajectories = [trajectory for session in golden.sessions for trajectory in session.trajectories()]
            rows = list(adapter(samples(trajectories)))
        except Exception as raised:
            refused = golden.refusable and isinstance(raised, InvalidRequest)
            report.goldens[golden.name] = (
                [] if refused else [RowFinding("failed", f"{type(raised).__name__}: {raised}")]
            )
            report.refused.update({golden.name: str(raised)} if refused else {})
            continue
        present.update(name for row in rows for name in names if getattr(row, name) is not None)
        row_findings = report.goldens[golden.name] = findings(golden, rows)
        placed, _ = place(golden, rows)
        trained = [match for match in placed if match.trained]
        untrained = [match.row for match in placed if not match.trained]
        for error in ERRORS:
            wrong = error.plant(golden, trained)
            if any(map(_differ, wrong, [match.row for match in trained])):
                kinds = {finding.kind for finding in findings(golden, wrong + untrained)}
                kinds -= {finding.kind for finding in row_findings}
                # A finding in the unchanged rows may hide the planted error, but then this batch has failed anyway.
                if error.kind in kinds or not row_findings:
                    report.planted[error.name][golden.name] = error.kind in kinds
    return replace(report, not_given=tuple(name for name in names if name not in present))


def _differ(left: Row, right: Row) -> bool:
    names = [attribute.name for attribute in fields(Row)]
    pairs = [(np.asarray(getattr(left, name)), np.asarray(getattr(right, name))) for name in names]
    return any(a.dtype != b.dtype or a.shape != b.shape or repr(a.tolist()) != repr(b.tolist()) for a, b in pairs)


def main(arguments: Sequence[str]) -> int:
    """Check the adapter that `MODULE:FUNCTION` names, print the report, and return the exit code."""
    if len(arguments) != 1 or ":" not in arguments[0]:
        print("usage: python -m tokentape.testing.samples MODULE:FUNCTION", file=sys.stderr)
        return 2
    module, _, name = arguments[0].partition(":")
    try:
        adapter = getattr(import_module(module), name, None) if module else None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # an import in the module failed
        print(f"error: there is no module {error.name!r}; run this where {module!r} can be imported", file=sys.stderr)
        return 2
    if not callable(adapter):
        found = "nothing" if adapter is None else type(adapter).__name__
        print(f"error: {arguments[0]!r} names {found}; expected MODULE:FUNCTION", file=sys.stderr)
        return 2
    report = check_samples(adapter)
    print(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
