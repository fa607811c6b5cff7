"""Find where two sequences of token ids differ, and classify each difference.

`compare` finds the differences. `Retokenizer` decodes ids and encodes the text again, as trainers do.
"""

from tokentape.audit._tokendiff.alignment import Segment, first_difference
from tokentape.audit._tokendiff.comparing import Comparison, Difference, Severity, compare
from tokentape.audit._tokendiff.kinds import ARTIFACTS, CLASSES, KINDS, boundary_artifact, text_artifact
from tokentape.audit._tokendiff.retokenizing import (
    Channel,
    Pairing,
    Retokenizer,
    RoundTrip,
    TokenDrift,
    check_vocabulary,
    is_canonical,
    pair_ids,
    retokenized,
)

__all__ = [
    "ARTIFACTS",
    "CLASSES",
    "KINDS",
    "Channel",
    "Comparison",
    "Difference",
    "Pairing",
    "Retokenizer",
    "RoundTrip",
    "Segment",
    "Severity",
    "TokenDrift",
    "boundary_artifact",
    "check_vocabulary",
    "compare",
    "first_difference",
    "is_canonical",
    "pair_ids",
    "retokenized",
    "text_artifact",
]
