"""Conversations with images through real clients on a real socket, against a model that sees."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import numpy as np
import openai
import pytest
from openai import OpenAI

pytest.importorskip("PIL", reason="needs Pillow (the extra `images`)")

from tests.media.conftest import Serve, assert_rounding_apart, data_url, image_url, text
from tests.media.tiny_vision import picture
from tokentape.client import Client
from tokentape.engines._image_processor import QwenImageProcessor
from tokentape.store import SqliteStore, verify
from tokentape.training._collate import media_arrays, padded, to_torch
from tokentape.training._samples import assemble
from tokentape.types import Provenance, Trajectory

A, B, C = picture(1, 100, 60), picture(2, 60, 200, "JPEG"), picture(3, 90, 90, "WEBP")
SPELLED = "I typed <|vision_start|><|image_pad|><|vision_end|> and <|im_end|> by hand"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def say(client: OpenAI, messages: list[Any], **options: Any) -> None:
    """Request a reply and append it to the messages, as agents do."""
    reply = client.chat.completions.create(
        model="vision", messages=messages, max_completion_tokens=6, seed=len(messages), **options
    )
    messages.append(reply.choices[0].message.model_dump(exclude_none=True))


def converse(client: OpenAI) -> list[Any]:
    """Four turns: an image, placeholders spelled in text, another image after text, an image that a tool returns."""
    messages: list[Any] = [{"role": "user", "content": [image_url(A), text("what is this")]}]
    say(client, messages)
    messages.append({"role": "user", "content": SPELLED})
    say(client, messages)
    messages.append({"role": "user", "content": [text("and"), image_url(B), text("this?")]})
    say(client, messages)
    messages.append({"role": "tool", "tool_call_id": "call_1", "content": [text("a screenshot:"), image_url(C)]})
    say(client, messages)
    return messages


def the_only(data: Path) -> Trajectory:
    with SqliteStore.open(data, read_only=True) as store:
        (stored,) = store.iter_sessions()
        (trajectory,) = stored.trajectories()
    return trajectory


def loader(data: Path, session_id: str) -> Any:
    def load(digest: str) -> bytes:
        with SqliteStore.open(data, read_only=True) as store:
            return store.load_media(session_id, digest).data

    return load


def forward_logprobs(model: Any, trajectory: Trajectory, load: Any) -> Any:
    """What a trainer computes, from processor outputs made again: logprobs, [sampled tokens, vocabulary]."""
    import torch

    batch = padded(assemble([trajectory]).samples, pad_id=0, vocab_size=4016, length=len(trajectory.token_ids) + 5)
    inputs = to_torch(media_arrays(batch, load))
    ids, mask = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.attention_mask)
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=mask, **inputs).logits[0].log_softmax(-1)
    return logits[np.flatnonzero(trajectory.provenance == Provenance.SAMPLED) - 1]


def assert_recomputable(model: Any, trajectory: Trajectory, load: Any) -> None:
    """Assert that the recorded logprobs are those of a forward pass over the recorded ids and images."""
    sampled = trajectory.provenance == Provenance.SAMPLED
    recorded = trajectory.logprobs[sampled]
    ids = trajectory.token_ids[sampled]
    assert_rounding_apart(model, lambda model: forward_logprobs(model, trajectory, load), ids, recorded)


def own_processor(folder: Path) -> Any:
    """Transformers' processor for the model, the reference for ids and arrays."""
    from transformers import PreTrainedTokenizerFast, Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class WithoutVideos(Qwen2VLProcessor):  # a video processor needs torchvision
        def check_argument_for_proper_class(self, name: str, argument: Any) -> None:
            pass

    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    return WithoutVideos(
        image_processor=images,
        tokenizer=PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json")),
        video_processor=images,
        chat_template=(folder / "chat_template.jinja").read_text(),
    )


def own_ids(folder: Path, messages: Sequence[Any], **kwargs: Any) -> list[int]:
    from PIL import Image

    images_by_url = {image_url(image)["image_url"]["url"]: image for image in (A, B, C)}
    plain = [
        {
            **message,
            "content": [
                {"type": "image", "image": Image.open(io.BytesIO(images_by_url[part["image_url"]["url"]]))}
                if "image_url" in part
                else part
                for part in message["content"]
            ],
        }
        for message in messages
    ]
    found = own_processor(folder).apply_chat_template(
        plain, tokenize=True, add_generation_prompt=True, return_dict=True, **kwargs
    )
    ids: list[int] = found["input_ids"][0]
    return ids


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "record"


def session_client(url: str, session_id: str = "s") -> OpenAI:
    return OpenAI(base_url=f"{url}/sessions/{session_id}/v1", api_key="none", max_retries=0)


def test_placeholder_ids_equal_those_of_the_transformers_processor(serve: Serve, data: Path, vision_dir: Path) -> None:
    with serve(data) as url:
        messages = converse(session_client(url))
    with SqliteStore.open(data, read_only=True) as store:
        turns = store.load_session("s").turns
    assert [turn.fork for turn in turns] == [None] * 4
    assert turns[0].added_ids.tolist() == own_ids(vision_dir, messages[:1])
    for turn, message in ((turns[2], messages[4]), (turns[3], messages[6])):
        expected = own_ids(vision_dir, [message])
        assert turn.added_ids[-len(expected) :].tolist() == expected
    media = [int((turn.added_provenance == Provenance.MEDIA).sum()) for turn in turns]
    assert media == [8, 0, 14, 9]


def test_text_that_spells_a_placeholder_stays_text(serve: Serve, data: Path, processor: QwenImageProcessor) -> None:
    with serve(data) as url:
        converse(session_client(url))
    with SqliteStore.open(data, read_only=True) as store:
        turn = store.load_session("s").turns[1]
    assert processor.placeholder_id not in turn.added_ids
    assert not (turn.added_provenance == Provenance.MEDIA).any()
    assert (turn.added_provenance == Provenance.USER).sum() > 20


def test_logprobs_are_those_of_a_forward_pass_over_what_the_record_gives(
    serve: Serve, data: Path, vision_model: Any
) -> None:
    with serve(data) as url:
        converse(session_client(url))
    trajectory = the_only(data)
    load = loader(data, "s")
    assert_recomputable(vision_model, trajectory, load)
    # The images matter: with another in place of the first they are others.
    other = picture(9, 100, 60)
    changed = replace(trajectory, media=(replace(trajectory.media[0], sha256=sha256(other)), *trajectory.media[1:]))
    with pytest.raises(AssertionError):
        assert_recomputable(vision_model, changed, lambda digest: other if digest == sha256(other) else load(digest))


def test_images_are_stored_once_by_their_hash(serve: Serve, data: Path, processor: QwenImageProcessor) -> None:
    with serve(data) as url:
        converse(session_client(url))
        converse(session_client(url, "another"))
        with Client(url) as client:
            session = client.session("s")
            media = [image for trajectory in session.trajectories() for image in trajectory.media]
            assert [image.sha256 for image in media] == [sha256(A), sha256(B), sha256(C)]
            assert [session.media(image.sha256) for image in media] == [A, B, C]
            assert json.loads(session.media(media[0].settings)) == json.loads(processor.settings.data)
        assert httpx2.get(f"{url}/sessions/s/media/{sha256(B)}").headers["content-type"] == "image/jpeg"
        assert httpx2.get(f"{url}/sessions/s/media/{sha256(b'unknown')}").status_code == 404
    with closing(sqlite3.connect(data / "tokentape.db")) as database, database:
        kept = dict(database.execute("SELECT sha256, mime FROM media").fetchall())
    assert kept == {
        sha256(A): "image/png",
        sha256(B): "image/jpeg",
        sha256(C): "image/webp",
        processor.settings.sha256: "application/json",
    }
    assert all(b"base64" not in json.dumps(turn.messages).encode() for turn in stored_turns(data))


def stored_turns(data: Path) -> list[Any]:
    with SqliteStore.open(data, read_only=True) as store:
        return [turn for session in store.iter_sessions() for turn in session.turns]


def test_media_are_deleted_with_their_last_session(serve: Serve, data: Path) -> None:
    with serve(data) as url:
        converse(session_client(url))
        converse(session_client(url, "another"))

        def kept() -> int:
            with closing(sqlite3.connect(data / "tokentape.db")) as database, database:
                return int(database.execute("SELECT count(*) FROM media").fetchone()[0])

        with Client(url) as client:
            client.session("s").delete()
            assert kept() == 4
            client.session("another").delete()
            assert kept() == 0


def test_verify_finds_a_changed_image(serve: Serve, data: Path) -> None:
    with serve(data) as url:
        converse(session_client(url))
    assert verify(data).ok
    with closing(sqlite3.connect(data / "tokentape.db")) as database, database:
        database.execute("UPDATE media SET data = ? WHERE mime = 'image/png'", (B,))
    assert any("hash" in finding.problem for finding in verify(data).findings)


def test_restarted_gateway_keeps_earlier_images(serve: Serve, data: Path, vision_model: Any) -> None:
    with serve(data) as url:
        messages = converse(session_client(url))
    with serve(data) as url:
        messages.append({"role": "user", "content": [image_url(A), text("the first one again")]})
        say(session_client(url), messages)
    trajectory = the_only(data)
    assert len(trajectory.turns) == 5
    assert [image.sha256 for image in trajectory.media] == [sha256(A), sha256(B), sha256(C), sha256(A)]
    assert_recomputable(vision_model, trajectory, loader(data, "s"))


def test_image_numbers_continue_if_the_template_numbers_images(serve: Serve, data: Path, vision_dir: Path) -> None:
    numbered = {"chat_template_kwargs": {"add_vision_id": True}}
    messages: list[Any] = [{"role": "user", "content": [image_url(A), text("one")]}]
    with serve(data) as url:
        client = session_client(url)
        say(client, messages, extra_body=numbered)
        messages.append({"role": "user", "content": [image_url(B), text("two")]})
        say(client, messages, extra_body=numbered)
    _, second = stored_turns(data)
    assert second.parent == 0
    expected = own_ids(vision_dir, [messages[0], messages[2]], add_vision_id=True)
    assert second.added_ids[-30:].tolist() == expected[-30:]
    alone = own_ids(vision_dir, [messages[2]], add_vision_id=True)
    assert second.added_ids[-len(alone) :].tolist() != alone


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}, "not fetched"),
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "not fetched"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "not fetched"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}}, "invalid base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "base64"),
        ({"type": "image_url", "image_url": {"url": data_url(b"<svg/>", "svg+xml")}}, "unknown format"),
        ({"type": "image_url", "image_url": {"url": data_url(A[:60])}}, "damaged or incomplete"),
        ({"type": "image_url", "image_url": {"url": data_url(picture(1, 4000, 2))}}, "can't be processed"),
        ({"type": "image_url", "image_url": {"url": data_url(A), "detail": "low"}}, "detail"),
        ({"type": "image", "sha256": sha256(A), "tokens": 8, "settings": "x"}, "text or an image"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "text or an image"),
    ],
)
def test_invalid_image_is_refused(serve: Serve, data: Path, part: Any, words: str) -> None:
    with serve(data) as url, pytest.raises(openai.BadRequestError, match=words) as refused:
        say(session_client(url), [{"role": "user", "content": [part]}])
    assert refused.value.param == "messages"


def test_error_about_an_image_names_its_part(serve: Serve, data: Path) -> None:
    images = [{"type": "input_image", "image_url": data_url(image)} for image in (A, A[:60])]
    body = {"input": [{"role": "user", "content": "see"}, {"role": "user", "content": images}]}
    with serve(data) as url:
        error = httpx2.post(f"{url}/v1/responses", json=body).json()["error"]
    assert error["message"].startswith("input[1].content[1]: the image is damaged or incomplete")
    assert error["param"] == "input"


def test_text_model_refuses_images(gateway_url: str) -> None:
    client = OpenAI(base_url=f"{gateway_url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="expected text only"):
        say(client, [{"role": "user", "content": [image_url(A)]}])


def test_responses_continue_with_images_from_the_record(serve: Serve, data: Path, vision_model: Any) -> None:
    with serve(data) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        shown = [
            {"type": "input_image", "image_url": data_url(A), "detail": "auto"},
            {"type": "input_text", "text": "what is this"},
        ]
        options: Any = {"model": "vision", "max_output_tokens": 6}
        first = client.responses.create(input=[{"role": "user", "content": shown}], **options)
        client.responses.create(input="and now?", previous_response_id=first.id, **options)
    trajectory = the_only(data)
    assert len(trajectory.turns) == 2
    assert_recomputable(vision_model, trajectory, loader(data, trajectory.session_id))


def test_anthropic_blocks_hold_images_in_messages_and_tool_results(serve: Serve, data: Path, vision_dir: Path) -> None:
    def block(image: bytes, kind: str) -> dict[str, Any]:
        data = data_url(image).partition(",")[2]
        return {"type": "image", "source": {"type": "base64", "media_type": f"image/{kind}", "data": data}}

    result = [{"type": "text", "text": "a screenshot:"}, block(C, "webp"), {"type": "text", "text": "done"}]
    messages: list[Any] = [{"role": "user", "content": [block(A, "png"), {"type": "text", "text": "look"}]}]
    with serve(data) as url:
        client = anthropic.Anthropic(base_url=f"{url}/sessions/s", api_key="none", max_retries=0)

        def ask() -> None:
            reply = client.messages.create(model="vision", max_tokens=6, messages=messages)
            messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})

        ask()
        messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": result}]})
        counted = client.messages.count_tokens(model="vision", messages=messages).input_tokens
        ask()
        far = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
        with pytest.raises(anthropic.BadRequestError, match="not fetched"):
            client.messages.create(model="vision", max_tokens=6, messages=[{"role": "user", "content": [far]}])
    trajectory = the_only(data)
    assert [image.sha256 for image in trajectory.media] == [sha256(A), sha256(C)]
    assert counted == trajectory.completion_starts[1]
    expected = own_ids(vision_dir, [{"role": "tool", "content": [text("a screenshot:"), image_url(C), text("done")]}])
    assert trajectory.token_ids[: trajectory.completion_starts[1]][-len(expected) :].tolist() == expected


def test_concurrent_calls_see_their_own_images(serve: Serve, data: Path, vision_model: Any) -> None:
    contents: list[Any] = [
        [image_url(A), text("one")],
        "no image at all, but some more words than in the others",
        [image_url(B), image_url(C), text("two")],
        [text("three"), image_url(C)],
    ]

    async def ask(url: str, n: int, content: Any) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/sessions/s{n}/v1", api_key="none") as client:
            await client.chat.completions.create(
                model="vision", messages=[{"role": "user", "content": content}], max_completion_tokens=8
            )

    async def send_all(url: str) -> None:
        # The first keeps the engine busy, so that the others share a batch.
        await asyncio.gather(*(ask(url, n, content) for n, content in enumerate(contents)))

    with serve(data) as url:
        asyncio.run(send_all(url))
    with SqliteStore.open(data, read_only=True) as store:
        found = [trajectory for session in store.iter_sessions() for trajectory in session.trajectories()]
    assert len(found) == len(contents)
    for trajectory in found:
        assert_recomputable(vision_model, trajectory, loader(data, trajectory.session_id))
