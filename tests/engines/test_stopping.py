from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tokentape.engines._requests import StopStrings

PIECES = st.text(alphabet="ab \n<|end>ü🙂日", min_size=1, max_size=4)


def first_stop(tokenizer: Tokenizer, ids: list[int], strings: list[str]) -> tuple[int, set[str]] | None:
    """The slow reference: decode the whole completion after every token."""
    for position in range(len(ids)):
        text = tokenizer.decode(ids[: position + 1], skip_special_tokens=False)
        present = {string for string in strings if string in text}
        if present:
            return position, present
    return None


def pushed(tokenizer: Tokenizer, ids: list[int], strings: list[str]) -> tuple[int, str] | None:
    stops = StopStrings(tokenizer, strings)
    for position, token_id in enumerate(ids):
        stop = stops.push(token_id)
        if stop is not None:
            return position, stop
    return None


def agrees(tokenizer: Tokenizer, ids: list[int], strings: list[str]) -> None:
    expected, actual = first_stop(tokenizer, ids, strings), pushed(tokenizer, ids, strings)
    if expected is None:
        assert actual is None
    else:
        assert actual is not None
        assert actual[0] == expected[0]
        assert actual[1] in expected[1]


@given(pieces=st.lists(PIECES, max_size=20), strings=st.lists(PIECES, min_size=1, max_size=3))
def test_a_stop_string_ends_at_the_token_that_completes_it(
    tokenizer: Tokenizer, pieces: list[str], strings: list[str]
) -> None:
    ids = [i for piece in pieces for i in tokenizer.encode(piece).ids]
    agrees(tokenizer, ids, strings)


@given(ids=st.lists(st.integers(0, 299), max_size=60), strings=st.lists(st.text(max_size=2, min_size=1), min_size=1))
def test_any_ids_agree_with_decoding_everything(tokenizer: Tokenizer, ids: list[int], strings: list[str]) -> None:
    agrees(tokenizer, ids, [string for string in strings if "\ufffd" not in string] or ["x"])


def test_a_character_spread_over_tokens_stops_at_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_to_id(token) for token in ("ð", "Ł", "ĺ", "Ģ")]  # the bytes f0 9f 98 80
    assert tokenizer.decode(ids) == "😀"
    assert pushed(tokenizer, ids, ["😀"]) == (3, "😀")


def test_first_started_of_two_simultaneous_stop_strings_is_reported(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_to_id(token) for token in "xyz"]
    assert pushed(tokenizer, ids, ["z", "yz"]) == (2, "yz")


def test_control_tokens_count_as_their_text(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id("<|end|>")
    assert pushed(tokenizer, [end], ["<|end|>"]) == (0, "<|end|>")


def test_leading_space_dropped_by_decoding_still_matches() -> None:
    tokenizer = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1}, unk_token="▁a"))
    tokenizer.decoder = decoders.Metaspace()
    assert tokenizer.decode([1]) == "b"
    assert pushed(tokenizer, [0, 1], [" "]) == (1, " ")
