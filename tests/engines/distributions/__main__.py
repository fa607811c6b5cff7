"""A table that compares each engine's recorded log-probabilities with a plain forward pass, draws and trainers.

    python -m tests.engines.distributions --engines embedded,vllm,vllm-raw,sglang --out test-output/distributions.json

Per engine, temperature and top-p, sessions are recorded by `tokentape serve`, and one-token completions drawn. Then

(a) for every recorded token, the largest difference of a forward pass from the declared distribution;
(b) chi-square of the draws at each of five prompts, against exp(recorded) if tokens were sampled from that
    distribution, else against a plain forward pass of the distribution that the record declares;
(c) per trainer, the largest difference of exported numbers from its formula, or the export's refusal;
(d) the largest difference of the engine's scores of the same ids from the model's distribution.

`--keep DIR` keeps the collected data, `--judge DIR` judges it again, and `--plant` reads it wrongly. The exit code
is 1 if anything is off: (a) or (d) by more than 1e-4, (c) by more than 1e-3, (b) at p <= 0.001, a refusal although the
trainer could have used the numbers, or a refusal that names no setting.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from tests.engines.distributions.collecting import MODEL, Cell, collect
from tests.engines.distributions.judging import PLANTS, judge, table

from tokentape.chat._renderer import Renderer


def main(arguments: Sequence[str] | None = None) -> int:
    """Collect, judge and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="embedded,embedded-raw,vllm,vllm-raw,sglang")
    parser.add_argument("--sessions", type=int, default=6, help="sessions of two turns for each setting")
    parser.add_argument("--draws", type=int, default=20_000, help="one-token completions of each of five prompts")
    parser.add_argument("--url", action="append", default=[], help="ENGINE=URL: a server that runs already")
    parser.add_argument("--out", type=Path, help="the rows as JSON")
    parser.add_argument("--keep", type=Path, help="what was collected, a file for each engine")
    parser.add_argument("--judge", type=Path, help="judge what was kept there; nothing is started")
    parser.add_argument("--plant", choices=PLANTS, help="read it wrongly: this has to fail")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    renderer = Renderer.load(MODEL)
    cells: list[Cell] = []
    urls = dict(option.split("=", 1) for option in asked.url)
    if asked.judge is not None:
        for name in asked.engines.split(","):
            cells += pickle.loads((asked.judge / f"{name}.pickle").read_bytes())
    else:
        for name in asked.engines.split(","):
            with tempfile.TemporaryDirectory() as folder:
                collected = collect(name, Path(folder), renderer, asked.sessions, asked.draws, urls)
            if asked.keep is not None:
                asked.keep.mkdir(parents=True, exist_ok=True)
                (asked.keep / f"{name}.pickle").write_bytes(pickle.dumps(collected))
            cells += collected
    rows, off = judge(cells, renderer, asked.plant)
    for line in table(rows):
        print(line)
    for line in off:
        print(line, file=sys.stderr)
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps({"plant": asked.plant, "off": off, "rows": rows}, indent=1), encoding="utf-8")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
