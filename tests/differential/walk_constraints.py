"""Sample replies at random under structural tags, with XGrammar: run with a Python that has it, as vLLM's has.

Takes JSON on stdin (see `test_call_constraints`), writes the ids of each tag's replies.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import xgrammar

LONGEST = 400


def sample(compiled: Any, vocab_size: int, stop_ids: list[int], likely: Any, random: Any) -> list[int] | None:
    """Return one reply, its stop id included; None if it got too long."""
    matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=stop_ids)
    bits = xgrammar.allocate_token_bitmask(1, vocab_size)
    ids: list[int] = []
    while len(ids) < LONGEST:
        matcher.fill_next_token_bitmask(bits)
        mask = np.unpackbits(bits.numpy().view(np.uint8), bitorder="little")[:vocab_size]
        closing = likely[mask[likely] == 1]
        # Random text would hardly ever end.
        allowed = closing if len(closing) and random.random() < 0.6 else np.flatnonzero(mask)
        ids.append(int(random.choice(allowed)))
        assert matcher.accept_token(ids[-1])
        if ids[-1] in stop_ids:
            assert matcher.is_terminated()
            return ids
    return None


def main() -> None:
    request = json.load(sys.stdin)
    pieces, stop_ids, random = (
        [bytes.fromhex(piece) for piece in request["pieces"]],
        request["stop_ids"],
        np.random.default_rng(0),
    )
    info = xgrammar.TokenizerInfo(pieces, xgrammar.VocabType.RAW, stop_token_ids=stop_ids)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    found = []
    for tag in request["tags"]:
        compiled = compiler.compile_structural_tag(tag)
        likely = np.array(request["likely"])
        replies = [sample(compiled, len(pieces), stop_ids, likely, random) for _ in range(request["count"])]
        found.append([reply for reply in replies if reply is not None])
    json.dump(found, sys.stdout)


main()
