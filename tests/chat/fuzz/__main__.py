"""Fuzz the parsers of every available template and print violations; the exit status is 1 if there are any.

python -m tests.chat.fuzz --count 1000
python -m tests.chat.fuzz --only Qwen3-Coder --count 1 --first 17 --show      # a single completion
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from itertools import chain
from pathlib import Path

from tests.chat.fuzz.completions import TOOLS, Completions
from tests.chat.fuzz.judge import complaints
from tests.chat.fuzz.templates import Pair, pairs, syntaxes
from tokentape.errors import TokentapeError


def run(pair: Pair, first: int, count: int, seed: str, *, show: bool = False) -> Counter[str]:
    """Judge completions of a pair. Return the count of each complaint, with the number of its first completion."""
    counts: Counter[str] = Counter()
    where: dict[str, int] = {}
    renderer, setup = pair.load(TOOLS)
    completions = Completions(renderer, setup, f"{seed} {pair.name}")
    for n in range(first, first + count):
        kind, ids = completions[n]
        stop_strings = ("the", "word.") if n % 11 == 10 else ()
        for complaint in complaints(renderer, setup, ids, random.Random(n), stop_strings):
            what = f"{kind}: {complaint.partition(': ')[0]}" if complaint.startswith("lost") else complaint
            counts[what] += 1
            where.setdefault(what, n)
            if show:
                print(json.dumps([n, complaint, renderer.tokenizer.decode(ids)], ensure_ascii=False))
        if show:
            parser = renderer.derived_parser(setup, stop_strings)
            parser.feed(ids)
            print(n, kind, parser.finish()[1])
    return Counter({f"{what} (first: {where[what]})": times for what, times in counts.items()})


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="completions per template")
    parser.add_argument("--first", type=int, default=0, help="number of the first completion")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--only", default="", help="templates with this in their name")
    parser.add_argument("--syntaxes", action="store_true", help="a composed template of each call syntax as well")
    parser.add_argument("--composed", type=int, default=0, help="that many composed templates as well")
    parser.add_argument("--show", action="store_true", help="print completions and replies")
    parser.add_argument("roots", nargs="*", type=Path, help="further folders of templates")
    options = parser.parse_args(arguments)
    tried = bad = 0
    began = time.process_time()
    for pair in chain(pairs(options.roots, composed=options.composed), syntaxes() if options.syntaxes else ()):
        if options.only not in pair.name:
            continue
        try:
            complaint_counts = run(pair, options.first, options.count, options.seed, show=options.show)
        except TokentapeError as error:
            print(f"{pair.name}: not loaded: {error}", flush=True)
            continue
        tried += 1
        bad += bool(complaint_counts)
        if complaint_counts:
            print(
                pair.name, *(f"    {times} x {what}" for what, times in complaint_counts.items()), sep="\n", flush=True
            )
    seconds = time.process_time() - began
    print(f"{tried} templates x {options.count} completions, {bad} with complaints, {seconds:.0f} s of CPU")
    return 1 if bad or not tried else 0


if __name__ == "__main__":
    sys.exit(main())
