from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.chat.conftest import slow_unless
from tokentape.chat import _tokenizer as tokenizer_module
from tokentape.chat import _twin_proof as twin_proof
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate
from tokentape.chat._tokenizer import Tokenizer
from tokentape.chat._tokenizer_files import from_text, read_added_tokens
from tokentape.chat._twin_proof import prove_twin, twin_difference
from tokentape.demo import MODEL
from tokentape.errors import TokenizerUnusable

FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}


def spec_with(*tokens: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """Return the tiny model's tokenizer.json with more added tokens, in this order."""
    spec = json.loads((MODEL / "tokenizer.json").read_bytes())
    spec |= parts
    next_id = 1 + max(token["id"] for token in spec["added_tokens"])
    spec["added_tokens"] += [{"id": next_id + n, **FLAGS, **token} for n, token in enumerate(tokens)]
    return spec


def tokenizer_of(spec: dict[str, Any], *named: str, strict_text: bool = False) -> Tokenizer:
    return Tokenizer(json.dumps(spec).encode(), {}, named_in=named, strict_text=strict_text)


TAG, SPACES, CALL, BOX = ({"content": text} for text in ("<b>", "   ", "<call>", "<|box|>"))


def test_html_tags_and_spaces_are_text() -> None:
    tokenizer = tokenizer_of(spec_with(TAG, SPACES))
    for text in ("<b>bold</b>", "def f():\n   return 1"):
        assert tokenizer.encode_marked(text).ids == tokenizer.encode_plain(text)
    assert {"<b>", "   "} <= {token.content for token in tokenizer.text_tokens}


def test_a_token_that_the_template_writes_is_control() -> None:
    tokenizer = tokenizer_of(spec_with(CALL)).for_template("{{ '<call>' }}")
    call = tokenizer.control("<call>")
    assert call is not None
    assert call.id not in tokenizer.encode_marked("<call>").ids
    assert tokenizer.encode_marked(call.mark).ids == [call.id]


def test_token_that_the_template_assembles_is_control() -> None:
    source = "{% for m in messages %}{{ '[' + m.role | upper + ']' + m.content }}{% endfor %}"
    tokenizer = Renderer(tokenizer_of(spec_with({"content": "[USER]"}, TAG)), ChatTemplate(source)).tokenizer
    assert tokenizer.control("[USER]") is not None
    assert tokenizer.control("<b>") is None


def test_plain_word_of_the_template_stays_text() -> None:
    spec = spec_with({"content": "weather"})
    tokenizer = tokenizer_of(spec).for_template("Tools for the weather")
    assert tokenizer.control("weather") is None
    assert tokenizer.encode_marked("the weather").ids == tokenizer.encode_plain("the weather")


@pytest.mark.parametrize("config", [{"image_token_id": 4001}, {"boi_token": "<image>"}])
def test_a_token_that_a_configuration_names_is_control(config: dict[str, Any]) -> None:
    spec = spec_with({"content": "<image>"})
    token = read_added_tokens(spec)[-1]
    named = {key: token.id if key.endswith("_id") else value for key, value in config.items()}
    assert Tokenizer(json.dumps(spec).encode(), named).control("<image>") is not None


def test_list_of_all_added_tokens_makes_none_control() -> None:
    spec = spec_with(TAG)
    config = {"added_tokens_decoder": {"4000": {"content": "<b>"}}}
    assert Tokenizer(json.dumps(spec).encode(), config).control("<b>") is None


CONFIGURED: dict[str, dict[str, Any]] = {
    "flags": {"added_tokens_decoder": {"3993": {"content": "<|im_end|>", "rstrip": True, "special": True}}},
    "another token": {"added_tokens_decoder": {"4000": {"content": "<extra>"}}},
    "special token in the vocabulary": {"eos_token": {"__type": "AddedToken", "content": "unction", "rstrip": True}},
    "model's own special token in the vocabulary": {"boi_token": "unction"},
    "additional special token in the vocabulary": {"additional_special_tokens": ["unction", "<|im_end|>"]},
    "named special token in the vocabulary": {"extra_special_tokens": {"image_token": "unction"}},
}


@pytest.mark.parametrize("name", CONFIGURED)
def test_configuration_changes_added_tokens_as_in_transformers(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **CONFIGURED[name]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    text = "x<|im_end|>  y<extra> unknown function unction\n\nz"
    expected = PreTrainedTokenizerFast.from_pretrained(tmp_path).encode(text, add_special_tokens=False)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode_plain(text) == expected
    assert tokenizer.encode_marked(tokenizer.mark_controls(text)).ids == expected
    assert Tokenizer.load(MODEL).encode_plain(text) != expected


@pytest.mark.parametrize("decoder", [["<a>"], {"7": "<a>"}, {"7": {"special": True}}, {"x": {"content": "<a>"}}])
def test_unreadable_added_tokens_name_the_configuration(decoder: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    with pytest.raises(TokenizerUnusable, match=r"^added_tokens_decoder in tokenizer_config.json can't be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["<|box|>", "<\uff5cbox\uff5c>", "<|box>", "<box|>"])
def test_tokens_between_bars_are_control(content: str) -> None:
    assert tokenizer_of(spec_with({"content": content})).control(content) is not None


def test_strict_text_makes_every_added_token_except_white_space_control() -> None:
    tokenizer = tokenizer_of(spec_with(TAG, SPACES), strict_text=True)
    tag = tokenizer.control("<b>")
    assert tag is not None
    assert tag.id not in tokenizer.encode_marked("<b>").ids
    assert [token.content for token in tokenizer.text_tokens] == ["   "]


def test_ids_match_the_library() -> None:
    spec = spec_with({"content": "<|far|>"}, {"content": "<|next|>"})
    in_vocabulary = next(iter(spec["model"]["vocab"]))
    spec["added_tokens"][-2]["id"] += 500
    spec["added_tokens"].append({"id": 9000, **FLAGS, "content": in_vocabulary})
    library = from_text(json.dumps(spec))
    tokens = {token.content: token.id for token in read_added_tokens(spec)}
    assert tokens == {content: library.token_to_id(content) for content in tokens}
    assert tokens["<|far|>"] != spec["added_tokens"][-3]["id"]


VARIANTS = {
    "plain": {},
    "normalized": {"normalized": True},
    "special": {"special": True},
    "single word": {"single_word": True},
    "lstrip": {"lstrip": True},
    "rstrip": {"rstrip": True},
    "rstrip, normalized": {"rstrip": True, "normalized": True},
}
NORMALIZERS: dict[str, dict[str, Any]] = {
    "NFC": {"type": "NFC"},
    "Lowercase": {"type": "Lowercase"},
    "Replace": {"type": "Replace", "pattern": {"String": "  "}, "content": " "},
}


@pytest.mark.parametrize("flags", [slow_unless(name, "rstrip, normalized") for name in VARIANTS])
def test_the_twin_keeps_the_flags_of_tokens(flags: str) -> None:
    spec = spec_with(*({**token, **VARIANTS[flags]} for token in (TAG, CALL, BOX)), SPACES)
    assert twin_difference(tokenizer_of(spec, "<call>"), cuts=500) is None


def test_control_token_that_is_text_beside_letters_is_refused() -> None:
    end = json.loads((MODEL / "tokenizer.json").read_bytes())["added_tokens"][2]
    spec = spec_with()
    spec["added_tokens"][2] = {**end, "single_word": True}
    assert end["id"] not in from_text(json.dumps(spec)).encode("It is this<|im_end|>").ids
    with pytest.raises(TokenizerUnusable, match="single_word to false"):
        prove_twin(tokenizer_of(spec))


@pytest.mark.parametrize("normalizer", [slow_unless(name, "Replace") for name in NORMALIZERS])
def test_the_twin_keeps_the_normalizer(normalizer: str) -> None:
    spec = spec_with(TAG, {**CALL, "normalized": True}, BOX, SPACES, normalizer=NORMALIZERS[normalizer])
    assert twin_difference(tokenizer_of(spec, "<call>"), cuts=500) is None


def test_a_normalized_token_includes_the_space_that_the_normalizer_adds() -> None:
    spec = spec_with({"content": "fox", "normalized": True}, normalizer={"type": "Prepend", "prepend": " "})
    fox = from_text(json.dumps(spec)).encode("fox", add_special_tokens=False).ids
    assert tokenizer_of(spec).pieces(fox) == [b" fox"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", ["merges", "vocab", "normalizer", "added_tokens"])
def test_a_twin_that_differs_in_one_part_is_refused(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    rename = tokenizer_module.renamed_controls

    def faulty(spec: Any, name: Any) -> dict[str, Any]:
        twin = rename(spec, name)
        match part:
            case "merges":
                twin["model"]["merges"] = [m for m in twin["model"]["merges"] if m != twin["model"]["merges"][-1]]
            case "vocab":
                vocab = twin["model"]["vocab"]
                left, right = [piece for piece in vocab if piece.isascii() and piece.isalpha()][-2:]
                vocab[left], vocab[right] = vocab[right], vocab[left]
            case "normalizer":
                twin["normalizer"] = {"type": "NFKC"}
            case _:
                twin["added_tokens"] = [token for token in twin["added_tokens"] if token["content"] != "<b>"]
        return twin

    monkeypatch.setattr(tokenizer_module, "renamed_controls", faulty)
    monkeypatch.setattr(twin_proof, "_AT_ONCE", 2000)  # it ends with the texts that include the difference
    with pytest.raises(TokenizerUnusable, match="encodes to"):
        prove_twin(tokenizer_of(spec_with(TAG)))


def test_proof_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TOKENTAPE_CACHE", str(tmp_path))
    tokenizer = tokenizer_of(spec_with(TAG))
    proved: list[Tokenizer] = []
    monkeypatch.setattr(twin_proof, "twin_difference", proved.append)
    prove_twin(tokenizer)
    prove_twin(tokenizer)
    assert proved == [tokenizer]


def test_no_file_is_written_for_a_differing_twin(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TOKENTAPE_CACHE", str(tmp_path))
    monkeypatch.setattr(
        tokenizer_module, "renamed_controls", lambda spec, name: {**spec, "normalizer": {"type": "NFD"}}
    )
    monkeypatch.setattr(twin_proof, "_AT_ONCE", 2000)
    with pytest.raises(TokenizerUnusable):
        prove_twin(tokenizer_of(spec_with(TAG)))
    assert not list(tmp_path.rglob("*.json"))


def test_an_unknown_decoder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TOKENTAPE_CACHE", str(tmp_path))
    with pytest.raises(TokenizerUnusable, match=r"^unknown tokenizer decoder WordPiece"):
        prove_twin(tokenizer_of(spec_with(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})))
