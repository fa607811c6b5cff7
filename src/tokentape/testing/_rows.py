"""Compare the rows that a loss function gets with golden sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tokentape.testing.golden import PAD, Golden, GoldenSession, Token


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence as the loss function gets it. A per-token field has each value at the index of its token, not shifted.

    Fields that are None are not checked, and the report lists them.
    """

    token_ids: Any
    """Ids of one sample, with or without padding. Split a packed row into one row per sample."""
    weights: Any
    """Weight of each token in the loss, for example the loss mask. A common factor for the batch does not matter."""
    logprobs: Any = None
    """Logprob of each token under the policy that sampled it. Read where `weights` is not 0."""
    advantages: Any = None
    """Advantage of each token: reward minus group mean, times any factor per group. Read where `weights` is not 0."""
    reward: float | None = None
    """The reward of the row's session. If a session has several rows, at least one of them must have the reward."""
    truncated: bool | None = None
    """Whether the row ends in a turn that was cut off by its token limit (finish reason `length`)."""
    weight_versions: Any = None
    """The weight versions that sampled, as text or numbers: one per token, or a set for the row."""
    temperature: float | None = None
    """The temperature by which the trainer divides logits."""
    position_ids: Any = None
    """Position of each token: 0 for the first token that is not padding. Not read at padding."""


@dataclass(frozen=True, slots=True)
class RowFinding:
    """What is wrong with a trainer's rows. docs/how-to/check-trained-samples.md lists the kinds."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Placed:
    """A row, matched with a path of a golden session."""

    row: Row
    session: GoldenSession
    cells: list[Token | None]
    """The sampled token at each position; None for context and padding."""
    start: int
    end: int
    """`cells[start:end]` is the row without padding."""

    @property
    def trained(self) -> dict[int, Token]:
        """Sampled tokens with a weight other than 0, by position."""
        return {n: cell for n, cell in enumerate(self.cells) if cell is not None and self.row.weights[n]}

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """True at positions of sampled tokens."""
        return np.array([cell is not None for cell in self.cells])

    @property
    def real(self) -> npt.NDArray[np.bool_]:
        """True at positions without padding."""
        return (np.arange(len(self.cells)) >= self.start) & (np.arange(len(self.cells)) < self.end)

    @property
    def prompt(self) -> npt.NDArray[np.bool_]:
        """True at positions before the first sampled token."""
        return self.real & (np.arange(len(self.cells)) < self.sampled.argmax())

    @property
    def scored(self) -> bool:
        return self.session.reward is not None


def _plain(row: Row) -> Row:
    versions = row.weight_versions
    of_row = isinstance(versions, set | frozenset)
    names = np.asarray([*versions] if of_row else versions).astype(str)  # a trainer's versions may be numbers
    return replace(
        row,
        token_ids=np.asarray(row.token_ids),
        weights=np.asarray(row.weights, np.float64),
        logprobs=None if row.logprobs is None else np.asarray(row.logprobs),
        advantages=None if row.advantages is None else np.asarray(row.advantages, np.float64),
        reward=None if row.reward is None or np.isnan(row.reward) else float(row.reward),
        weight_versions=None if versions is None else set(names.tolist()) if of_row else names,
        position_ids=None if row.position_ids is None else np.asarray(row.position_ids),
    )


def findings(golden: Golden, rows: Sequence[Row]) -> list[RowFinding]:
    """Compare rows with the golden turns."""
    placed, report = place(golden, rows)
    for match in placed:
        report += [*_mask(match), *_logprobs(match), *_labels(match)]
    return [*report, *_weights(golden, placed), *_rewards(golden, placed), *_advantages(golden, placed)]


def place(golden: Golden, rows: Sequence[Row]) -> tuple[list[Placed], list[RowFinding]]:
    """Find the golden path that each row is a prefix of. Report rows that are not a prefix of any path."""
    paths = [(session, path) for session in golden.sessions for path in session.paths()]
    placed, report = [], []
    for n, row in enumerate(map(_plain, rows)):
        ids, size = row.token_ids.tolist(), len(row.token_ids)
        arrays = [getattr(row, field.name) for field in fields(Row)]
        if any(isinstance(values, np.ndarray) and values.shape != (size,) for values in arrays):
            report.append(RowFinding("lengths differ", f"row {n} has {size} tokens, but a field has not {size} values"))
            continue
        longest, best = 0, None
        for session, path in paths:
            path_ids = [cell.id if isinstance(cell, Token) else cell for cell in path]
            for start in range(size):
                if ids[:start] != [PAD] * start:
                    break
                differing = (i for i in range(len(path)) if i + start >= size or ids[start + i] != path_ids[i])
                common = next(differing, len(path))
                longest = max(longest, common)
                if {*ids[start + common :]} <= {PAD} and (best is None or common > best.end - best.start):
                    cells = [cell if isinstance(cell, Token) else None for cell in path[:common]]
                    cells = [*[None] * start, *cells, *[None] * (size - start - common)]
                    best = Placed(row, session, cells, start, start + common)
        if best is None or not any(best.cells):
            rest = {*ids[longest:]}
            padding = f", only id {min(rest)}; if that pads, use golden.PAD" if len(rest) == 1 and rest != {PAD} else ""
            text = f"row {n}: no session has the ids after the first {longest} tokens{padding}"
            report.append(RowFinding("ids not as recorded", text))
        else:
            placed.append(best)
    return placed, report


def _mask(match: Placed) -> Iterator[RowFinding]:
    on = match.row.weights != 0
    wrong = on & ~match.sampled
    context = match.real & ~match.sampled
    # Some masks cover only the response. If such a mask is inverted, the prompt stays untrained.
    inner = context & ~match.prompt if (context & ~match.prompt).any() else context
    last_turn = max(cell.turn for cell in match.cells if cell is not None)
    to_left = not on[-1] and _of_whole_turns(match, np.append(0, on[:-1]))
    to_right = _of_whole_turns(match, np.append(on[1:], 0)) and not _of_whole_turns(match, on)
    if wrong.any() and on[inner].all() and all(cell.turn != last_turn for cell in match.trained.values()):
        kind = "mask inverted"
    elif on.any() and ((wrong.any() and to_left) or to_right):
        kind = "mask shifted"
    elif not wrong.any():
        return
    elif not (wrong & match.real).any():
        kind = "padding trained"
    else:
        kind = "prompt trained" if (wrong & match.prompt).any() else "context trained"
    yield RowFinding(kind, f"a row of session {match.session.name} trains positions {np.flatnonzero(on).tolist()}")


def _of_whole_turns(match: Placed, on: npt.NDArray[Any]) -> bool:
    """Return whether a mask covers whole turns. The last position of the row may be missing."""
    turns = {cell.turn for cell, is_on in zip(match.cells, on, strict=True) if is_on and cell is not None}
    whole = np.array([cell is not None and cell.turn in turns for cell in match.cells])
    return bool((on[:-1] == whole[:-1]).all() and on[-1] <= whole[-1])


def _weights(golden: Golden, placed: Sequence[Placed]) -> Iterator[RowFinding]:
    """Check that each token is trained once, and that all tokens or all sessions have equal weight."""
    where: dict[Token, list[tuple[float, int]]] = {}
    for match in placed:
        for position, token in match.trained.items():
            where.setdefault(token, []).append((match.row.weights[position], len(match.trained)))
    by_reward = any(match.row.reward is not None or match.row.advantages is not None for match in placed)
    sessions = {s.name: s for s in golden.sessions if s.reward is not None or not by_reward}
    missing = [token for session in sessions.values() for token in session.tokens() if token not in where]
    if missing:
        last = all(token == sessions[token.session].turns[token.turn].sampled[-1] for token in missing)
        kind = "last token not trained" if last else "not trained"
        yield RowFinding(kind, f"{len(missing)} tokens trained in no row, first in session {missing[0].session}")
    twice = [token for token, rows in where.items() if len(rows) > 1]
    if twice:
        yield RowFinding("trained twice", f"{len(twice)} tokens in several rows, first in session {twice[0].session}")
    once = [(t.session, *rows[0]) for t, rows in where.items() if len(rows) == 1 and t.session in sessions]
    by_session = [weight * len(sessions[name].tokens()) for name, weight, _ in once]
    if _alike([weight for _, weight, _ in once]) or _alike(by_session):
        return
    by_row = [[weight * size for name, weight, size in once if name == session] for session in sessions]
    kind = "siblings counted as sessions" if all(map(_alike, by_row)) else "weights out of proportion"
    yield RowFinding(kind, "neither all tokens nor all sessions have equal weight in the loss")


def _alike(values: Sequence[float]) -> bool:
    least, most = np.min(values, initial=np.inf), np.max(values, initial=0)  # NaN if a value is
    return bool(least > 0 and most <= 1.0001 * least)


def _logprobs(match: Placed) -> Iterator[RowFinding]:
    if match.row.logprobs is None:
        return
    trained, logprobs = match.trained, match.row.logprobs.astype(np.float64).tolist()
    recorded = [0.0 if cell is None else cell.logprob() for cell in match.cells]

    def fits(expected: Callable[[int], float], within: float = 1e-5) -> bool:
        return all(abs(logprobs[position] - expected(position)) <= within for position in trained)

    def moved(by: int) -> Callable[[int], float]:
        return lambda position: recorded[position + by] if 0 <= position + by < len(recorded) else 0.0

    def at_temperature(value: float) -> Callable[[int], float]:
        return lambda position: trained[position].logprob(value)

    temperatures = (n / 100 for n in range(5, 301))
    least = min((logprobs[position] for position in trained), default=0.0)
    if fits(moved(0)) and match.row.logprobs.dtype != np.float16:
        return
    if all(abs(logprobs[position] - recorded[position]) <= 2**-8 * abs(recorded[position]) for position in trained):
        kind, text = "logprobs rounded", f"logprobs rounded to less than float32 precision ({match.row.logprobs.dtype})"
    elif not any(logprobs[position] for position in trained):
        kind, text = "logprobs missing", "logprob 0 for each trained token"
    elif (by := next((by for by in range(-len(logprobs), len(logprobs)) if fits(moved(by))), None)) is not None:
        kind, text = "logprobs shifted", f"logprobs shifted by {by:+} positions"
    elif (value := next((t for t in temperatures if fits(at_temperature(t), 1e-4)), None)) is not None:
        sampled_at = next(iter(trained.values())).temperature
        kind, text = "logprobs of another temperature", f"logprobs of {value:g}, but was sampled at {sampled_at:g}"
    elif least < max(logprobs[n] for n in trained) and fits(lambda position: max(recorded[position], least)):
        kind, text = "logprobs clamped", f"logprobs raised to at least {least:g}"
    else:
        kind, text = "logprobs differ", "logprobs other than those it was sampled with"
    yield RowFinding(kind, f"a row of session {match.session.name} has {text}")


def _labels(match: Placed) -> Iterator[RowFinding]:
    row, where = match.row, f"a row of session {match.session.name}"
    last = next(cell for cell in reversed(match.cells) if cell is not None)
    turn = match.session.turns[last.turn]
    cut = turn.finish == "length" and last == turn.sampled[-1]
    if row.truncated is not None and row.truncated != cut:
        yield RowFinding("truncation hidden" if cut else "truncation claimed", f"{where} ended with {turn.finish!r}")
    versions = row.weight_versions
    of_row = {cell.version for cell in match.cells if cell}
    of_trained = {cell.version for cell in match.trained.values()}
    if isinstance(versions, np.ndarray):
        consistent = all(versions[position] == token.version for position, token in match.trained.items())
    else:
        consistent = versions is None or of_trained <= versions <= of_row
    if not consistent:
        yield RowFinding("version of other weights", f"{where} was sampled by weight versions {sorted(of_trained)}")
    if row.temperature is not None and abs(row.temperature - last.temperature) > 1e-6:
        yield RowFinding("temperature differs", f"{where} has {row.temperature:g}, sampled at {last.temperature:g}")
    if row.position_ids is not None:
        positions = row.position_ids[match.start : match.end].tolist()
        if positions != [*range(len(positions))]:
            yield RowFinding("positions differ", f"{where} has {positions}, expected 0, 1, 2 and so on")


def _rewards(golden: Golden, placed: Sequence[Placed]) -> Iterator[RowFinding]:
    rewards = [(match.session, match.row.reward) for match in placed if match.row.reward is not None]
    rewarded = [session for session, _ in rewards]
    for session in golden.sessions if rewards else ():
        if session.reward is not None and session not in rewarded:
            yield RowFinding("reward missing", f"session {session.name} has {session.reward:g}, but no row has it")
    for session, value in rewards:
        expected, all_rewards = session.reward, [sibling.reward for sibling in golden.sessions]
        if expected is not None and abs(value - expected) <= 1e-6:
            continue
        if any(reward is not None and abs(value - reward) <= 1e-6 for reward in all_rewards):
            kind = "reward of another session"
        elif expected is None:
            kind = "reward invented"
        else:
            times = value / expected if expected else 0.0
            several = times > 1.5 and abs(times - round(times)) < 1e-6
            kind = "reward counted several times" if several else "reward differs"
        yield RowFinding(kind, f"a row of session {session.name} has {value:g}, but the session has {expected}")


def _advantages(golden: Golden, placed: Sequence[Placed]) -> Iterator[RowFinding]:
    """Check that a group's advantages are rewards minus their mean over sessions, times a positive factor."""
    by_session = golden.advantages()
    by_row = golden.advantages([match.session.name for match in placed if match.trained])
    groups: dict[str, list[tuple[float, float, float]]] = {}
    rewarded = all(match.row.reward == match.session.reward for match in placed if match.scored)
    for match in placed:
        name, advantages = match.session.name, match.row.advantages
        values = set() if advantages is None else {float(advantages[position]) for position in match.trained}
        if match.scored:
            groups.setdefault(match.session.group, []).extend((v, by_session[name], by_row[name]) for v in values)
        elif np.isfinite(list(values)).any():
            yield RowFinding("reward invented", f"session {name} has no reward, but its tokens have an advantage")
    for group, triples in groups.items():
        actual, expected, of_rows = np.array(triples).reshape(-1, 3).T
        if not triples or _proportional(actual, expected):
            continue
        times = actual / expected
        least = times.min()
        if _proportional(actual, of_rows):
            kind = "siblings counted as sessions"
        elif _proportional(-actual, expected) and (rewarded or not _symmetric(expected)):
            kind = "advantages of the wrong sign"
        elif least < 0:
            kind = "reward of another session"
        else:
            whole = least > 0 and np.allclose(times / least, np.round(times / least), atol=1e-4)
            kind = "reward counted several times" if whole else "advantages differ"
        shown = f"{actual.round(4).tolist()}, which should be proportional to {expected.round(4).tolist()}"
        yield RowFinding(kind, f"group {group} has advantages {shown}")


def _symmetric(values: npt.NDArray[Any]) -> bool:
    """Return whether the negated values are the same values, as if sessions had been exchanged."""
    distinct = np.unique(values.round(6))
    return bool(np.allclose(distinct, -distinct[::-1]))


def _proportional(values: npt.NDArray[Any], to: npt.NDArray[Any]) -> bool:
    largest = np.abs(to).argmax()
    factor = values[largest] / to[largest] if to[largest] and np.isfinite(values).all() else 0.0
    return bool(factor > 0 and np.allclose(values, factor * to, rtol=0, atol=1e-4 * np.abs(values).max()))
