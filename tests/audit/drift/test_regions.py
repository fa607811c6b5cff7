"""Regions and scripts of tokens, on texts in the formats that are in use."""

from __future__ import annotations

import pytest

from tokentape.audit._drift.meter import REGIONS, SCRIPTS, TokenScripts, token_regions
from tokentape.chat._renderer import Renderer


@pytest.mark.parametrize(
    ("text", "regions"),
    [
        ("only prose", "p" * 10),
        ("<think>a</think>b", "r" * 16 + "p"),
        ("a</think>b", "r" * 9 + "p"),
        ("a<tool_call>{}</tool_call>b", "p" + "t" * 25 + "p"),
        ("a```b```c", "p" + "c" * 7 + "p"),
        ("<think>```</think>a", "r" * 18 + "p"),
        ('{"name": "f"}', "t" * 13),
        ("[TOOL_CALLS][{}]", "t" * 16),
        ("<|channel|>analysis<|message|>a<|end|>b", "r" * 38 + "p"),
        ("<|channel|>commentary to=f<|message|>{}", "t" * 39),
        ("a < b [1] `c`", "p" * 13),
    ],
)
def test_each_byte_has_the_region_of_its_delimiters(text: str, regions: str) -> None:
    pieces = [bytes([byte]) for byte in text.encode()]
    found = token_regions(text.encode(), pieces)
    names = {"p": "prose", "r": "reasoning", "t": "tool call", "c": "code"}
    if found is None:
        assert set(regions) == {"p"}
    else:
        assert [REGIONS[code] for code in found.tolist()] == [names[region] for region in regions]


def test_a_token_has_the_region_that_it_begins_in() -> None:
    found = token_regions(b"ab<think>c", [b"ab", b"<th", b"ink>c"])
    assert found is not None
    assert [REGIONS[code] for code in found.tolist()] == ["prose", "reasoning", "reasoning"]


def test_scripts_are_those_of_the_first_letter(renderer: Renderer) -> None:
    tokenizer = renderer.tokenizer
    scripts = TokenScripts(tokenizer)

    def of(text: str) -> list[str]:
        return [SCRIPTS[code] for code in scripts.of(tokenizer.array(tokenizer.encode_plain(text))).tolist()]

    assert of(" the") == ["latin"]
    assert of("\n") == ["space"]
    assert of("1") == ["digit"]
    assert of("{") == ["punctuation"]
    assert of("<|im_end|>") == ["control"]
    assert set(of("漢")) <= {"bytes", "cjk"}
    assert of(" the") == ["latin"]
