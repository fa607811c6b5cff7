"""Results on disk, one JSON line each, so that a probe that was stopped goes on where it was.

The first line says what was probed and how. A last line that was cut off by a crash is dropped, its trial done again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tokentape.audit.probe.outcomes import Outcome
from tokentape.audit.probe.running import Result, Settings
from tokentape.audit.probe.trials import Trial
from tokentape.chat.renderer import Renderer
from tokentape.engines.base import Engine
from tokentape.errors import InvalidRequest
from tokentape.types import Setup

FORMAT = 1

_HEAD = b'{"format": %d,' % FORMAT
"""How the first line begins, of which a crash may have left a part."""

Header = Mapping[str, Any]


def header(engine: Engine, renderer: Renderer, setup: Setup, settings: Settings) -> Header:
    """The first line: everything that must be the same for results to be counted together."""
    how = asdict(settings)
    del how["concurrency"]
    return {
        "format": FORMAT,
        "engine": str(engine.info),
        "model": Path(engine.info.model).name,
        "fingerprint": renderer.fingerprint,
        "template_kwargs": dict(setup.template_kwargs),
        **how,
    }


class ProbeFile:
    """A file of results, opened to go on with it. Use as a context.

    Raises `InvalidRequest` if the file is of another model or was made with other settings, or is none.
    """

    def __init__(self, path: str | Path, made: Header) -> None:
        self.path = Path(path)
        self.results: list[Result] = []
        whole = 0
        if self.path.exists():
            found, self.results, whole = _read(self.path)
            other = [key for key, value in made.items() if found is not None and found.get(key) != value]
            if other:
                raise InvalidRequest(
                    f"{self.path} has results of another probe ({', '.join(other)} differ); name another file, or move "
                    "this one away"
                )
        self._file: IO[bytes] = self.path.open("r+b" if self.path.exists() else "xb")
        self._file.truncate(whole)
        self._file.seek(whole)
        if not whole:
            self._write(made)

    def __enter__(self) -> ProbeFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def missing(self, trials: Sequence[Trial]) -> list[Trial]:
        """Those without a result."""
        done = {result.trial.name for result in self.results}
        return [trial for trial in trials if trial.name not in done]

    def add(self, result: Result) -> None:
        """Append a result; it is in the file when this returns."""
        self._write(asdict(result))
        self.results.append(result)

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._file.flush()


def read_results(path: str | Path) -> tuple[Header, list[Result]]:
    """What a probe wrote. Raises `InvalidRequest` if it is no such file."""
    found, results, _ = _read(Path(path))
    if found is None:
        raise InvalidRequest(f"{path} is empty")
    return found, results


def _read(path: Path) -> tuple[Header | None, list[Result], int]:
    """Header, results, and how many bytes of whole lines there are."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    lines = content[:whole].splitlines()
    try:
        rows = [json.loads(line) for line in lines]
        if not rows and not _HEAD.startswith(content[: len(_HEAD)]):
            raise ValueError("it is one line of something else")
        if rows and rows[0].get("format") != FORMAT:
            raise ValueError(f"its first line is not that of format {FORMAT}")
        return (rows[0] if rows else None), [_result(row) for row in rows[1:]], whole
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise InvalidRequest(f"{path} has no results of a probe: {error}") from None


def _result(row: Mapping[str, Any]) -> Result:
    return Result(
        trial=Trial(**row["trial"]),
        completion=tuple(row["completion"]),
        outcome=_outcome(row["outcome"]),
        banned=None if row["banned"] is None else _outcome(row["banned"]),
        bans=tuple((at, token_id) for at, token_id in row["bans"]),
    )


def _outcome(row: Mapping[str, Any]) -> Outcome:
    return Outcome(**{**row, "source": tuple(row["source"]), "found": tuple(row["found"])})
