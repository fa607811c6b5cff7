"""The engine over a Tinker sampling client, with the real types of the package where it is installed.

They are heavy, so they may be in an environment of their own: TOKENTAPE_TINKER_PYTHON names its interpreter, and the
tests here then run in it too.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokentape.engines.base import SampleDelta, SamplingParams
from tokentape.engines.tinker import TinkerEngine
from tokentape.errors import EngineContractError, EngineTimeout, EngineUnavailable, InvalidRequest, UnsupportedParameter

PYTHON = os.environ.get("TOKENTAPE_TINKER_PYTHON")
PROMPT = np.array([3, 4, 5], np.int32)
PARAMS = SamplingParams(max_tokens=3)


@pytest.mark.engines
@pytest.mark.skipif(PYTHON is None, reason="needs a Python that has tinker: TOKENTAPE_TINKER_PYTHON")
def test_these_tests_pass_where_the_package_is() -> None:
    assert PYTHON is not None
    environment = {name: value for name, value in os.environ.items() if name != "TOKENTAPE_TINKER_PYTHON"}
    here = Path(__file__)
    command = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", str(here)]
    ran = subprocess.run(command, env=environment, cwd=here.parents[2], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "skipped" not in ran.stdout.replace("1 skipped", "")


class Client:
    """Answers with what a test put together from the real types, and keeps what it was asked."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[tuple[Any, ...]] = []

    async def sample(self, prompt: Any, num_samples: int, sampling_params: Any, *, topk_sample_logprobs: int) -> Any:
        self.asked.append((prompt, num_samples, sampling_params, topk_sample_logprobs))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def response(ids: list[int], logprobs: list[float] | None, reason: str, **more: Any) -> Any:
    tinker = pytest.importorskip("tinker")
    sequence = tinker.SampledSequence(
        stop_reason=reason,
        sequence_id="s",
        tokens_np=np.array(ids, np.int32),
        logprobs_np=None if logprobs is None else np.array(logprobs, np.float32),
        **more,
    )
    return tinker.SampleResponse(sequences=[sequence])


def sample(client: Client, params: SamplingParams = PARAMS, prompt: np.ndarray = PROMPT) -> SampleDelta:
    pytest.importorskip("tinker")

    async def main() -> SampleDelta:
        engine = TinkerEngine(client, model="m", vocab_size=100, max_context=64, weight_version="step-3")
        (delta,) = [d async for d in engine.sample(prompt, params, stream=True, request_id="a")]
        await engine.close()
        return delta

    return asyncio.run(main())


def test_a_completion_is_one_delta_with_the_ids_as_they_came() -> None:
    client = Client(response([11, 12, 13], [-0.5, -1.5, -2.5], "length"))
    delta = sample(client)
    assert delta == SampleDelta((11, 12, 13), (-0.5, -1.5, -2.5), "length", weight_version="step-3")
    ((prompt, samples, asked, top),) = client.asked
    assert (prompt.to_ints(), samples, top) == ([3, 4, 5], 1, 0)
    # Without stop ids nothing ends it: None would mean the model's own end-of-sequence ids.
    assert (asked.max_tokens, asked.stop, asked.top_k, asked.seed) == (3, [], -1, None)


def test_stop_ids_are_sent_as_numbers_and_the_last_id_says_which_one_it_was() -> None:
    client = Client(response([11, 13], [-0.5, -1.5], "stop"))
    delta = sample(client, replace(PARAMS, stop_token_ids=(12, 13)))
    assert client.asked[0][2].stop == [12, 13]
    assert (delta.finish_reason, delta.stop) == ("stop", 13)


def test_alternatives_are_given_best_first() -> None:
    tinker = pytest.importorskip("tinker")
    from tinker.types.topk_logprobs import TopkLogprobs

    assert tinker
    matrix = TopkLogprobs(np.array([[1, 11]], np.int32), np.array([[-2.0, -0.5]], np.float32))
    client = Client(response([11], [-0.5], "length", topk_logprobs_np=matrix))
    delta = sample(client, SamplingParams(max_tokens=1, top_logprobs=2))
    assert client.asked[0][3] == 2
    assert delta.top_logprobs == (((11, -0.5), (1, -2.0)),)


@pytest.mark.parametrize(
    ("ids", "logprobs", "reason", "says"),
    [
        ([11, 12, 13], None, "length", "0 log-probabilities for 3"),
        ([11, 12, 13], [-0.5, -0.5], "length", "2 log-probabilities for 3"),
        ([11, 12, 200], [-0.5] * 3, "length", "sampled id 200"),
        ([11, 12], [-0.5] * 2, "length", "after 2 of 3"),
        ([11, 12], [-0.5] * 2, "stop", "not at one of the stop"),
        ([11] * 4, [-0.5] * 4, "length", "sampled 4 tokens"),
        ([11] * 3, [-0.5] * 3, "tired", "unknown reason"),
    ],
)
def test_a_reply_that_disagrees_with_itself_is_refused(
    ids: list[int], logprobs: list[float] | None, reason: str, says: str
) -> None:
    with pytest.raises(EngineContractError, match=says):
        sample(Client(response(ids, logprobs, reason)))


@pytest.mark.parametrize("params", [{"min_p": 0.1}, {"repetition_penalty": 1.1}, {"priority": 1}])
def test_what_the_service_would_ignore_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameter, match=next(iter(params))):
        sample(Client(None), replace(PARAMS, **params))


def test_stop_ids_and_stop_strings_together_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="not both"):
        sample(Client(None), replace(PARAMS, stop_token_ids=(1,), stop_strings=("x",)))


def test_an_id_outside_the_vocabulary_is_never_sent() -> None:
    client = Client(None)
    with pytest.raises(InvalidRequest, match="vocabulary"):
        sample(client, prompt=np.array([100], np.int32))
    assert not client.asked


def test_the_services_errors_become_ours_without_their_sentences() -> None:
    tinker = pytest.importorskip("tinker")
    import httpx

    request = httpx.Request("POST", "http://service/")
    refused = httpx.Response(400, request=request)
    for error, kind in [
        (tinker.APITimeoutError(request=request), EngineTimeout),
        (tinker.APIConnectionError(message="secret prompt", request=request), EngineUnavailable),
        (tinker.BadRequestError("secret prompt", response=refused, body=None), InvalidRequest),
    ]:
        with pytest.raises(kind) as caught:
            sample(Client(error))
        assert "secret" not in str(caught.value)
