"""Check whole completions against their request, where that needs their text.

An engine that ignores a stop string, reports one that is not there, or ignores a JSON schema is refused. To refuse a
correct engine would be worse than to miss a fault, so the rules allow all that servers do: vLLM, SGLang and llama.cpp
decode the same ids to slightly different texts, and search for stop strings in different parts of them.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from codecs import utf_8_decode
from collections.abc import Sequence
from itertools import accumulate

from tokentape.chat._parse import Reply
from tokentape.chat._tokenizer import Tokenizer
from tokentape.engines._base import SPECULATED, EngineInfo, SamplingParams
from tokentape.errors import EngineContractError
from tokentape.types import FinishReason

_RESERVED = 2
"""SGLang leaves up to this many positions of its context unused."""

_CLEANED_UP = re.compile(rb" [.,?!']|' | n't")
"""Where some tokenizers (`clean_up_tokenization_spaces`) drop a space, so that a server may not find the string."""

_INSIDE_A_CHARACTER = frozenset(bytes([byte]) for byte in range(0x80, 0xC0))


def check_stop_strings(
    tokenizer: Tokenizer, ids: Sequence[int], stop: int | str | None, strings: Sequence[str], min_tokens: int, late: int
) -> None:
    """Raise `EngineContractError` if an engine call ignored a stop string, or reports one that it did not sample.

    `ids` are all ids of the call, `stop` is what the engine says it stopped at, `strings` and `min_tokens` are those of
    the request, and `late` is the engine's `EngineInfo.late_stops`. Ids that are not valid UTF-8 are not checked,
    because servers decode them differently.
    """
    pieces = tokenizer.pieces(ids)
    data = b"".join(pieces)
    try:
        text, valid = utf_8_decode(data, "strict", False)
    except UnicodeDecodeError:
        return
    if "\ufffd" in text:
        return
    if isinstance(stop, str):
        if not _may_contain(stop, _texts(tokenizer, ids, text)):
            raise EngineContractError(
                f"the engine says that it stopped at a stop string of the request, but the {len(ids)} tokens that it "
                "returned don't contain that string"
            )
        # Older versions of vLLM report the string, and return the tokens that were sampled with it in one step.
        late = SPECULATED
    ends = list(accumulate(map(len, pieces)))
    for number, string in enumerate(strings, 1):
        last = _noticed(tokenizer, ids[: max(len(ids) - late, 0)], data[:valid], ends, string, min_tokens)
        if last is not None:
            raise EngineContractError(
                f"the engine continued after stop string {number} of the request (tokens after it: "
                f"{len(ids) - 1 - last}); expected it to stop there. Use a server that supports `stop`"
            )


def _noticed(
    tokenizer: Tokenizer, ids: Sequence[int], data: bytes, ends: Sequence[int], string: str, min_tokens: int
) -> int | None:
    """Return the index of the first of `ids` after which every server must have found `string`; None if there is none.

    `data` are the bytes up to the last complete character, and `ends` the end of each id in them. The last of `ids` is
    left out, because a server may end there for another reason. An occurrence counts only if

    - its last token ends a character, because servers hold back a text that ends inside one;
    - it has no control token, because some servers leave these out of the text;
    - it has no more tokens than SGLang searches: as many as the string encoded alone, and one;
    - there are more than `min_tokens` tokens by then.
    """
    needle = string.encode()
    # SentencePiece decoders drop a space at the start of what they decode, so there must be a token before it.
    spaced = string[0].isspace()
    start = data.find(needle)
    while start >= 0:
        first, last = bisect_right(ends, start), bisect_left(ends, start + len(needle))
        if last >= len(ids) - 1:
            return None
        if (
            last >= min_tokens
            and first >= spaced
            and ends[last] <= len(data)
            and data[ends[last] : ends[last] + 1] not in _INSIDE_A_CHARACTER
            and not any(map(tokenizer.control_by_id, ids[first - spaced : last + 1]))
            and not _CLEANED_UP.search(data, max(start - 1, 0), start + len(needle) + len("n't"))
            and not tokenizer.control_pattern.search(string)
            and last - first < len(tokenizer.encode_marked(string).array) + (not spaced)
        ):
            return last
        start = data.find(needle, start + 1)
    return None


def _may_contain(string: str, texts: Sequence[str]) -> bool:
    """Return whether a server may have decoded the ids, spelled in any of `texts`, to a text with `string`.

    Servers may drop or add spaces, and leave out control tokens.
    """
    if "\ufffd" in string or not string.strip(" "):
        return True
    needle = "".join(string.split())
    if not needle:
        return any(string in text for text in texts)
    return any(needle in "".join(text.split()) for text in texts)


def _texts(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[str]:
    """Return `text`, that of all ids, and the texts without special tokens and without control tokens."""
    controls = {token_id: control for token_id in ids if (control := tokenizer.control_by_id(token_id)) is not None}
    if not controls:
        return [text]
    special = [token_id for token_id in ids if token_id not in controls or not controls[token_id].special]
    plain = [token_id for token_id in ids if token_id not in controls]
    return [text, tokenizer.decode(special), tokenizer.decode(plain)]


def check_json(tokenizer: Tokenizer, ids: Sequence[int], reply: Reply, stop: int | str | None) -> None:
    """Raise `EngineContractError` if the reply of a call with a JSON schema, which ended at id `stop`, is not JSON.

    Some servers don't apply the schema to reasoning, so either the content or the text after the last control token in
    it must be JSON. A reply is checked only if it ended at a control token: other stops may come before the JSON ends.
    """
    if not isinstance(stop, int) or tokenizer.control_by_id(stop) is None or reply.tool_calls:
        return
    end = len(ids)
    while end and tokenizer.control_by_id(ids[end - 1]) is not None:
        end -= 1
    begin = end
    while begin and tokenizer.control_by_id(ids[begin - 1]) is None:
        begin -= 1
    if not any(map(_is_json, (reply.content, tokenizer.decode(ids[begin:end])))):
        raise EngineContractError(
            "the engine did not follow the request's JSON schema: its reply is not JSON. Check that the server "
            "constrains sampling to schemas (vLLM's and SGLang's grammar backend)"
        )


def _is_json(text: str) -> bool:
    try:
        json.loads(text, strict=False)
    except RecursionError:
        return True
    except ValueError:
        return False
    return True


def limited_by_server(
    finish_reason: FinishReason | None, sampled: int, prompt_tokens: int, params: SamplingParams, info: EngineInfo
) -> bool:
    """Return whether a completion has the finish reason `length` although request and context allow more tokens.

    vLLM (`max_new_tokens` of `--override-generation-config`) and SGLang (`SGLANG_MAX_NEW_TOKENS_LIMIT`, a cache smaller
    than the context) have limits of their own.
    """
    limit = min(params.max_tokens, info.max_context - prompt_tokens - _RESERVED)
    return finish_reason == "length" and sampled < limit
