"""A gateway over an engine of this process."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.vocabularies import changed_tokenizer
from tests.waiting import PATIENCE
from tokentape import Client
from tokentape.chat._renderer import Renderer
from tokentape.chat._template import ChatTemplate
from tokentape.engines import FunctionEngine, SampleDelta, SamplingParams
from tokentape.errors import InvalidRequest
from tokentape.gateway import serving
from tokentape.types import TokenDistribution


@pytest.mark.parametrize("mode", ["raw_logprobs", None])
def test_a_gateway_over_a_function_records_what_the_function_returned(
    model_dir: Path, renderer: Renderer, mode: str | None
) -> None:
    ids = renderer.tokenizer.encode_plain("Twelve.<|im_end|>")
    logprobs = [-0.25 * (n + 1) for n in range(len(ids))]
    prompts: list[list[int]] = []

    async def function(prompt_ids: list[int], params: SamplingParams) -> Any:
        prompts.append(prompt_ids)
        return SampleDelta(tuple(ids), tuple(logprobs), "stop", weight_version="41")

    options = {} if mode is None else {"logprobs_mode": mode}
    engine = FunctionEngine(function, vocab_size=renderer.tokenizer.vocab_size, max_context=2048, **options)
    with serving(engine, model_dir, renderer=renderer) as url, Client(url) as client:
        session = client.session()
        body = {"model": "any", "messages": [{"role": "user", "content": "Tell me."}], "max_tokens": 50}
        answer = httpx2.post(f"{session.base_url}/chat/completions", json=body, timeout=PATIENCE).raise_for_status()
        assert answer.json()["choices"][0]["message"]["content"] == "Twelve."
        (path,) = session.trajectories()
    assert path.token_ids.tolist() == [*prompts[0], *ids]
    assert path.logprobs[path.loss_mask].tolist() == logprobs
    assert path.weight_versions == ("41",)
    assert path.logprobs_of == (None if mode is None else TokenDistribution(False, 1.0, False, False),)


def test_a_record_of_another_tokenizer_is_refused_and_left_as_it_was(
    model_dir: Path, renderer: Renderer, tmp_path: Path
) -> None:
    prompts: list[list[int]] = []

    async def function(prompt_ids: list[int], params: SamplingParams) -> Any:
        prompts.append(prompt_ids)
        return SampleDelta((7, 8), (-0.5, -0.5), "length")

    def served(renderer: Renderer, folder: Path | str) -> AbstractContextManager[str]:
        engine = FunctionEngine(function, vocab_size=renderer.tokenizer.vocab_size, max_context=2048)
        return serving(engine, folder, directory=tmp_path / "data", renderer=renderer)

    def ask(url: str) -> None:
        body = {"messages": [{"role": "user", "content": "Tell me."}]}
        httpx2.post(f"{url}/sessions/s/v1/chat/completions", json=body, timeout=PATIENCE).raise_for_status()

    with served(renderer, model_dir) as url:
        ask(url)
    model = (tmp_path / "data/model.json").read_bytes()
    other = Renderer(changed_tokenizer(model_dir), renderer.template)
    with pytest.raises(InvalidRequest, match="belongs to another tokenizer"), served(other, tmp_path):
        pass
    assert (tmp_path / "data/model.json").read_bytes() == model
    assert len(prompts) == 1
    # The same tokenizer with another template and other weights goes on.
    template = ChatTemplate(renderer.template.source + "{# changed #}")
    with served(Renderer(renderer.tokenizer, template), model_dir) as url:
        ask(url)
