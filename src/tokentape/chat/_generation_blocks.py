"""Find the text in a template's `{% generation %}` blocks, from which transformers makes loss masks."""

from __future__ import annotations

import re

from tokentape.chat._caller_text import SENTINELS
from tokentape.chat._template import ChatTemplate

_TAG = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_OPEN, _CLOSE = SENTINELS[:2]


def has_blocks(source: str) -> bool:
    return _TAG.search(_COMMENT.sub("", source)) is not None


def without_tags(source: str) -> str:
    """Return the source with the tags of its blocks turned into comments."""
    return _TAG.sub(r"{#\1 \3#}", source)


def with_marks(template: ChatTemplate) -> ChatTemplate:
    """Return a template that renders the same text, with marks around the text of each block; see `cut_marks`."""
    variant = template.tool_use_source
    return ChatTemplate(_TAG.sub(_marked, template.source), variant and _TAG.sub(_marked, variant))


def _marked(tag: re.Match[str]) -> str:
    """Return a tag and a mark inside the block, with the tag's whitespace control at both ends."""
    left, end, right = tag.groups()
    mark = f'{{{{ "\\u{ord(_CLOSE if end else _OPEN):04x}" }}}}'
    if end:
        return f"{{%{left} if true %}}{{% endif %}}{mark}{{% endgeneration {right}%}}"
    return f"{{%{left} generation %}}{mark}{{% if true %}}{{% endif {right}%}}"


def cut_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a rendering without its marks, and the range of characters in each block that is not in another one."""
    pieces: list[str] = []
    ranges: list[tuple[int, int]] = []
    position = start = depth = 0
    for piece in re.split(f"([{_OPEN}{_CLOSE}])", text):
        if piece == _OPEN:
            start = start if depth else position
            depth += 1
        elif piece == _CLOSE:
            depth -= 1
            if not depth:
                ranges.append((start, position))
        else:
            pieces.append(piece)
            position += len(piece)
    return "".join(pieces), ranges
