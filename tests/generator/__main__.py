"""Run the generator; see `tests.generator`."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.generator.causes import Cause, known_causes, reduce, unexplained, write_known
from tests.generator.examine import CONVERSATIONS, case_of, examine, examined, template_of
from tests.generator.judge import INDEPENDENT, LOCAL
from tests.generator.options import only


def run(seed: int, templates: int, count: int, out: Path, processes: int) -> list[dict[str, Any]]:
    """Examine the templates that `out` does not have yet, append a line for each, and return all of them."""
    done = {result["index"]: result for result in _read(out) if result["seed"] == seed}
    tasks = [(seed, index, count) for index in range(templates) if index not in done]
    started = time.monotonic()
    with ExitStack() as held:
        file = held.enter_context(out.open("a", encoding="utf-8"))
        # Spawned, not forked: a process with threads of tokenizers or torch cannot fork safely.
        # A process keeps 30 MB of each case, none of it Python's own, so it ends after some. ProcessPoolExecutor hangs
        # when its processes end (python/cpython#115634).
        spawn = get_context("spawn")
        pool = held.enter_context(spawn.Pool(processes, maxtasksperchild=10)) if processes > 1 else None
        results = map(examined, tasks) if pool is None else pool.imap(examined, tasks, chunksize=2)
        for n, result in enumerate(results, 1):
            file.write(json.dumps(result, ensure_ascii=False) + "\n")
            file.flush()
            done[result["index"]] = result
            if n % 50 == 0:
                print(f"{len(done)} of {templates} templates, {time.monotonic() - started:.0f} s", flush=True)
    return [done[index] for index in sorted(done) if index < templates]


def _read(out: Path) -> Iterator[dict[str, Any]]:
    if out.is_file():
        for line in out.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                print(f"a line of {out.name} was cut short; that template is run again")


def find_causes(results: list[Mapping[str, Any]] | list[dict[str, Any]], known: list[Cause], count: int) -> list[Cause]:
    """Reduce findings that no known cause explains, one after the other, until all are explained."""
    causes = list(known)
    while pending := unexplained(results, causes):
        result, kind = min(pending, key=lambda pair: len(pair[0]["cause"]))
        case = case_of(result["seed"], result["index"])
        # A few conversations suffice, except for checks over all of them.
        shown = {finding["conversation"] for finding in result["findings"] if finding["kind"] == kind}
        few = None if kind.startswith("needless") else sorted(shown)[:3]
        found = reduce(case, kind, lambda tried, few=few: examine(tried, count, numbers=few).kinds)
        reduced = examine(only(case, found), count).findings
        example = next((finding.detail for finding in reduced if finding.kind == kind), "not seen again when reduced")
        causes.append(Cause(kind, tuple(found), case.seed, case.index, example[:200]))
        print(f"{kind}: {', '.join(found) or 'the plainest case'}: {example[:160]}", flush=True)
    return causes[len(known) :]


def summary(results: list[dict[str, Any]], causes: list[Cause]) -> str:
    """A table of comparisons, and of findings by kind and by cause."""
    compared: Counter[str] = Counter()
    for result in results:
        compared.update(result["counts"])
    lines = [f"{len(results)} templates, {sum(r['seconds'] for r in results):.0f} s of CPU", "", "compared:"]
    lines += [f"{number:8d}  {what}" for what, number in compared.most_common()]
    if compared[INDEPENDENT]:
        lines += ["", f"{100 * compared[LOCAL] / compared[INDEPENDENT]:.1f} % of {INDEPENDENT} are certified local"]
    lines += ["", "templates  findings  kind"]
    kinds = Counter(kind for r in results for kind in {f["kind"] for f in r["findings"]})
    for kind, number in kinds.most_common():
        lines.append(f"{number:9d}  {sum(f['kind'] == kind for r in results for f in r['findings']):8d}  {kind}")
    lines += ["", "templates  kind: cause"]
    for cause in causes:
        number = sum(cause.explains(kind, r["cause"]) for r in results for kind in {f["kind"] for f in r["findings"]})
        if number:
            lines.append(f"{number:9d}  {cause.kind}: {', '.join(cause.cause) or 'the plainest case'}")
            lines.append(f"{'':11}{cause.command}")
    rest = unexplained(results, causes)
    lines += ["", f"{len(rest)} findings are of no known class"]
    lines += [f"  {kind}: python -m tests.generator --case {r['seed']}:{r['index']}" for r, kind in rest]
    return "\n".join(lines)


def show(seed: int, index: int, causes: list[str] | None, count: int) -> None:
    """Print one case's template and findings."""
    case = case_of(seed, index)
    if causes is not None:
        case = only(case, [cause for cause in causes if cause])
    print(f"case {seed}:{index}: {', '.join(case.cause) or 'the plainest'}\n\n{template_of(case).source}\n")
    result = examine(case, count)
    for finding in result.findings:
        print(f"{finding.kind} (conversation {finding.conversation}): {finding.detail}")
    print(f"\n{len(result.findings)} findings; compared: {result.counts}; {result.seconds} s of CPU")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.generator", description=__doc__)
    parser.add_argument("--templates", type=int, default=50)
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON lines; a run that was stopped goes on there")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--causes", action="store_true", help="reduce what no known failure explains")
    parser.add_argument("--update-known", action="store_true", help="add the causes found to known_failures.json")
    parser.add_argument("--case", help="SEED:INDEX: examine this one and print its template and findings")
    parser.add_argument("--only", action="append", help="with --case: keep this option of it; may be repeated")
    options = parser.parse_args()
    if options.case:
        seed, index = map(int, options.case.split(":"))
        show(seed, index, options.only, options.conversations)
        return
    out = options.out or Path(f"generator-{options.seed}.jsonl")
    print(f"seed {options.seed}, {options.templates} templates of {options.conversations} conversations, to {out.name}")
    results = run(options.seed, options.templates, options.conversations, out, options.processes)
    known = known_causes()
    if options.causes or options.update_known:
        found = find_causes(results, known, options.conversations)
        if options.update_known:
            write_known([*known, *found])
        known += found
    print(summary(results, known))


if __name__ == "__main__":
    main()
