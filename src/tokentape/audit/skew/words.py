"""Words that the reports of an audit share, on a terminal and as a page."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence

from tokentape.audit.skew.findings import Finding, Probe

_HARD_TO_SEE = ("Mn", "Mc", "Me", "Cc", "Cf", "Co", "Cn", "Cs", "Zs", "Zl", "Zp")

TRIED: Mapping[Probe, str] = {
    "encode": "texts",
    "corpus": "documents",
    "special": "texts with BOS and EOS",
    "decode": "decodings",
    "render": "conversations",
    "masks": "loss masks",
    "echo": "prompts of a server",
    "facts": "facts",
}
"""What the inputs of each probe are called."""


def inputs_word(finding: Finding) -> str:
    """How many inputs of which probe, and where they are from."""
    if finding.probe == "facts":
        return "by what the sides say of themselves"
    what = TRIED[finding.probe] if finding.count > 1 else TRIED[finding.probe].replace("texts", "text").rstrip("s")
    where = f": {', '.join(finding.where)}" if finding.where else ""
    return f"{finding.count} {what}{where}"


def quoted(text: str) -> str:
    r"""Text in quotes, with what can't be told apart by eye as escapes: combining marks, odd spaces, what is unseen.

    >>> print(quoted("e\u0301 \u00e9"))
    "e\u0301 é"
    """
    return "".join(_shown(char) for char in json.dumps(text, ensure_ascii=False))


def _shown(char: str) -> str:
    if char == " " or unicodedata.category(char) not in _HARD_TO_SEE:
        return char
    return json.dumps(char)[1:-1]


def apart(one: Sequence[object], other: Sequence[object]) -> int:
    """The position from which two sequences differ."""
    both = zip(one, other, strict=False)
    return next((at for at, (x, y) in enumerate(both) if x != y), min(len(one), len(other)))
