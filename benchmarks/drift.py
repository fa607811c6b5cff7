"""Measure the drift meter: its cost on ten million tokens, and its findings on non-canonical ids.

    python benchmarks/drift.py speed --tokenizer qwen3 --tokens 10_000_000
    python benchmarks/drift.py simulated --tokenizer qwen3 --tokenizer llama3
    python benchmarks/drift.py tiny

`speed` writes a Parquet file of completions and runs `tokentape drift` on it in a separate process. It reports wall and
CPU seconds and the peak memory of that process. `simulated` encodes text and splits one token in a thousand into two
others. This simulates a model that sometimes samples another spelling, with a known truth. The text is code and
docstrings of the standard library, tool calls made from it, and an article of the Universal Declaration of Human
Rights. `tiny` runs the demo's agents, with a model that was trained with BPE dropout, and measures the record.

Tokenizers are folders in TOKENTAPE_TOKENIZERS, by default ../shared/tokenizers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokentape.audit._drift.meter import measure_drift
from tokentape.audit._drift.report import DriftReport
from tokentape.audit._id_rows import IdRow, Span
from tokentape.audit._statistics import Rate
from tokentape.chat._tokenizer import Tokenizer
from tokentape.errors import InvalidRequest

REPOSITORY = Path(__file__).parents[1]
ROOT = Path(os.environ.get("TOKENTAPE_TOKENIZERS", REPOSITORY.parent / "shared" / "tokenizers"))

# Article 1 of the Universal Declaration of Human Rights.
ARTICLES = {
    "english": "All human beings are born free and equal in dignity and rights. They are endowed with reason and "
    "conscience and should act towards one another in a spirit of brotherhood.",
    "russian": "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом и совестью "
    "и должны поступать в отношении друг друга в духе братства.",
    "greek": "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα. Είναι προικισμένοι "
    "με λογική και συνείδηση, και οφείλουν να συμπεριφέρονται μεταξύ τους με πνεύμα αδελφοσύνης.",
    "chinese": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。",
    "korean": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. 인간은 천부적으로 이성과 양심을 "
    "부여받았으며 서로 형제애의 정신으로 행동하여야 한다.",
    "hindi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है। उन्हें बुद्धि और "
    "अन्तरात्मा की देन प्राप्त है और परस्पर उन्हें भाईचारे के भाव से बर्ताव करना चाहिए।",
}


def code(most: int) -> Iterator[str]:
    """Yield files of the standard library, up to `most` characters."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        yield text[:most]
        most -= len(text)
        if most <= 0:
            return


def texts(characters: int) -> dict[str, list[str]]:
    """Return texts of about 2,000 characters by kind: code, prose, tool calls, and languages."""
    source = "".join(code(characters))
    # Comments and docstrings are wrapped prose; the rest is code.
    prose = " ".join(" ".join(part.split()) for part in re.findall(r'"""(.*?)"""', source, re.DOTALL))
    calls = [
        "<tool_call>\n"
        + json.dumps({"name": "search", "arguments": {"query": line.strip(), "limit": n % 97, "exact": n % 2 == 0}})
        + "\n</tool_call>"
        for n, line in enumerate(source.splitlines())
        if len(line.strip()) > 30
    ][: characters // 150]
    found = {
        "code": _pieces(source),
        "prose": _pieces(prose),
        "tool call": ["".join(calls[n : n + 12]) for n in range(0, len(calls), 12)],
    }
    return found | {name: [article * 4] * 40 for name, article in ARTICLES.items()}


def _pieces(text: str) -> list[str]:
    return [text[at : at + 2000] for at in range(0, len(text) - 2000, 2000)]


class Resplit:
    """Return canonical ids where some tokens, at random, are split into two others with the same text."""

    def __init__(self, tokenizer: Tokenizer, share: float) -> None:
        self.tokenizer = tokenizer
        self.share = share
        self.random = np.random.default_rng(0)
        ordinary = [one for one in range(tokenizer.vocab_size) if tokenizer.control_by_id(one) is None]
        self.by_bytes = {piece: one for one in ordinary if (piece := _bytes_of(tokenizer, one))}
        self.changed = 0

    def split(self, canonical: Sequence[int]) -> list[int]:
        found: list[int] = []
        for one, drawn in zip(canonical, self.random.random(len(canonical)).tolist(), strict=True):
            halves = self.halves(one) if drawn < self.share else []
            if halves:
                found += halves[self.random.integers(len(halves))]
                self.changed += 2
            else:
                found.append(one)
        return found

    def halves(self, token_id: int) -> list[tuple[int, int]]:
        piece = self.tokenizer.token_bytes(token_id)
        known = self.by_bytes
        if self.tokenizer.control_by_id(token_id) is not None:
            return []
        cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        return [(known[one], known[other]) for one, other in cuts if one in known and other in known]


def _bytes_of(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return the bytes of an id, empty for an unused id."""
    try:
        return tokenizer.token_bytes(token_id)
    except InvalidRequest:
        return b""


def simulated(names: list[str], share: float, characters: int) -> None:
    for name in names:
        tokenizer = Tokenizer.load(ROOT / name)
        resplit = Resplit(tokenizer, share)
        rows = []
        for kind, pieces in texts(characters).items():
            for n, text in enumerate(pieces):
                ids = np.array(resplit.split(resplit.tokenizer.encode_plain(text)), np.int32)
                rows.append(IdRow(f"{kind} {n}", ids, (Span(0, len(ids), {"text": kind}),)))
        show(
            f"{name}: of the tokens {share:.2%} were split, which made {resplit.changed:,}",
            measure_drift(rows, tokenizer),
        )


def show(title: str, report: DriftReport) -> None:
    print(f"\n{title}")
    print(f"  completions {_rate(report.completions)}")
    print(f"  tokens      {_rate(report.tokens)}")
    for stratum in report.strata:
        if stratum.dimension in ("text", "script", "temperature"):
            print(f"    {stratum.dimension:<12}{stratum.value:<14}{_rate(stratum.tokens)}")
    total = sum(one.stretches for one in report.artifacts)
    for one in report.artifacts:
        print(f"    {one.name:<26}{one.stretches / total:>7.1%}  {one.stretches:,}")
    print(f"  again as many {report.same_count:,}, more {report.more_tokens:,}, fewer {report.fewer_tokens:,}")


def _rate(rate: Rate) -> str:
    return f"{rate.share:.3%} {rate.interval} of {rate.total:,}"


def speed(name: str, tokens: int) -> None:
    """Write the file in batches and measure it in another process."""
    folder = ROOT / name
    resplit = Resplit(Tokenizer.load(folder), 0.001)
    encoded = [
        resplit.split(resplit.tokenizer.encode_plain(text)) for pieces in texts(2_000_000).values() for text in pieces
    ]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ids.parquet"
        schema = pa.schema([("token_ids", pa.list_(pa.int32())), ("session_id", pa.string())])
        written = rows = 0
        with pq.ParquetWriter(path, schema) as writer:
            while written < tokens:
                writer.write_table(
                    pa.table({"token_ids": encoded, "session_id": [f"{rows + n}" for n in range(len(encoded))]}, schema)
                )
                written += sum(map(len, encoded))
                rows += len(encoded)
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "tokentape", "drift", str(path), "--tokenizer", str(folder), "--json"],
            check=True,
            capture_output=True,
        )
        seconds = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu, memory = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
    found = json.loads(done.stdout)
    print(
        f"{name}: {found['tokens']['total']:,} tokens in {rows:,} rows, {path.name}: {seconds:.1f} s on the clock, "
        f"{cpu:.1f} s of CPU ({cpu / written * 1e6:.2f} µs per token), at most {memory:.0f} MiB; "
        f"{found['tokens']['share']:.3%} changed"
    )


def tiny(sessions: int) -> None:
    from tokentape.audit._id_rows import iter_rows

    model = REPOSITORY / "src" / "tokentape" / "demo" / "model"
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "demo"
        command = [sys.executable, "-m", "tokentape", "demo", "--out", str(out), "--sessions", str(sessions), "--json"]
        subprocess.run(command, check=True, capture_output=True)
        show(f"tiny model, {sessions} sessions", measure_drift(iter_rows(out), Tokenizer.load(model)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "simulated", "tiny"])
    parser.add_argument("--tokenizer", action="append", metavar="NAME")
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--share", type=float, default=0.001, help="share of tokens to split (simulated)")
    parser.add_argument("--characters", type=int, default=1_000_000, help="characters of code (simulated)")
    parser.add_argument("--sessions", type=int, default=128)
    arguments = parser.parse_args()
    names = arguments.tokenizer or ["qwen3"]
    match arguments.what:
        case "speed":
            for name in names:
                speed(name, arguments.tokens)
        case "simulated":
            simulated(names, arguments.share, arguments.characters)
        case _:
            tiny(arguments.sessions)


if __name__ == "__main__":
    main()
