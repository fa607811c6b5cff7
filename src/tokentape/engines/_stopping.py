"""Find stop strings in the text of a completion, token by token, for engines that sample in process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class StopStrings:
    """Finds stop strings in a completion's text, in which control tokens are spelled out.

    Only the last few ids are decoded for each token. Sampling ends at the first match, so a match ends in the newest
    token. A token has at least one byte, so a stop string of n bytes lies within the last n tokens. A few more tokens
    are decoded because decoding may change the start of the text (it drops a space, or cuts a character).

        >>> stops = StopStrings(tokenizer, ["\\n\\n"])
        >>> [stops.push(token_id) for token_id in tokenizer.encode("one\\n\\ntwo").ids]
        [None, '\\n\\n', None]
    """

    _MARGIN = 4

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        longest = max(len(string.encode()) for string in self._strings)
        self._window: deque[int] = deque(maxlen=longest + self._MARGIN)

    def push(self, token_id: int) -> str | None:
        """Add the next sampled id, and return the stop string that it completes; the earliest if there are several."""
        self._window.append(token_id)
        text = self._tokenizer.decode(list(self._window), skip_special_tokens=False)
        matches = [string for string in self._strings if string in text]
        return min(matches, key=text.find, default=None)
