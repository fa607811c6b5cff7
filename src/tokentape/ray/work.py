"""Pieces of work through Ray Data: each done by one of some actors, the results in the order of the pieces."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

from tokentape.errors import TokentapeError
from tokentape.ray.installed import require_ray

Piece = TypeVar("Piece")
Result = TypeVar("Result")

MOST_ACTORS = 1024
"""Ray starts as many as it has CPUs for."""

Row: TypeAlias = dict[str, Any]


def in_order(
    pieces: Sequence[Piece],
    opened: Callable[[], Callable[[Piece], Result]],
    *,
    actors: int | None = None,
    cpus: float = 1.0,
) -> Iterator[Result]:
    """Yield the result of each piece, in order; what is done early waits here.

    `opened` makes, once in each actor, what does the work. At most `actors` are started, each with `cpus`. What they
    raise of `TokentapeError` is raised here.
    """
    require_ray()
    import ray.data

    if not pieces:
        return
    rows = [{"number": number, "piece": pickle.dumps(piece)} for number, piece in enumerate(pieces)]
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
        _Actor,
        fn_constructor_args=[pickle.dumps(opened)],
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=min(actors or MOST_ACTORS, len(rows))),
        num_cpus=cpus,
    )
    early: dict[int, Result] = {}
    following = 0
    for row in dataset.iter_rows():
        result = pickle.loads(row["result"])
        if isinstance(result, TokentapeError):
            raise result
        early[row["number"]] = result
        while following in early:
            yield early.pop(following)
            following += 1


class _Actor:
    """Does pieces of work, one after the other."""

    def __init__(self, opened: bytes) -> None:
        self._work = pickle.loads(opened)()

    def __call__(self, row: Row) -> Row:
        try:
            result = self._work(pickle.loads(row["piece"]))
        except TokentapeError as error:
            # As it is: Ray would wrap it.
            result = error
        return {"number": row["number"], "result": pickle.dumps(result)}
