"""Run your agent as a harness of verifiers or prime-rl, sampling from the run's vLLM server.

Written for verifiers 0.4.1.dev86 and prime-rl 559b44772. Put this in a package of yours, and set `harness.id` to the
package's name:

    class Harness(AgentHarness, vf.Harness[vf.HarnessConfig]):
        agent = staticmethod(agent)         # async def agent(base_url, api_key, task) -> float | None

    __all__ = ["Harness"]

`task` has the fields of the task's data, and `mcp_urls`. The trace has the agent's reward under the name `agent`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from tokentape.chat._reader import read_text
from tokentape.engines._base import SampleDelta, SamplingParams, WeightSpan
from tokentape.engines._replies import finish_reason_of
from tokentape.errors import InvalidRequest
from tokentape.training._live import imported, live_gateway, vllm_fields
from tokentape.training._samples import Sample
from tokentape.training._stop_rule import StopRule
from tokentape.training.exports import verifiers_nodes
from tokentape.types import Message

__all__ = ["AgentHarness"]

_SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "stop_token_ids"})


class AgentHarness:
    """Base class for a harness; list it before `vf.Harness`. The agent runs in the process of verifiers' worker.

    The trace is made from the recorded session. If the agent raises, the rollout fails. verifiers' timeouts and retries
    apply. Its limits on turns and tokens and `@stop` do not, because calls don't go through its interception server.
    """

    APPENDS_SYSTEM_PROMPT, SUPPORTS_MCP, NEEDS_CONTAINER = True, True, False
    agent: ClassVar[Any]
    """The agent as a static method, or its name as `package.module.name`."""
    directory: ClassVar[Path | str | None] = None
    """Where sessions are recorded under their trace's id. With None, the record is deleted at the end."""
    logprobs_mode: ClassVar[str] = "processed_logprobs"
    """The `logprobs_mode` that the vLLM server was started with."""
    stop_rule: ClassVar[StopRule | None] = None

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> Any:
        """Run the agent in a new session, and fill `trace` from the recorded session."""
        import verifiers.v1 as vf
        from verifiers.v1.clients.base import build_async_openai

        model_dir = getattr(ctx.client, "renderer_model_name", None) or ctx.model
        trained = ctx.client.type == "train"
        sampling = ctx.sampling.model_dump(exclude_none=True)
        sampling |= sampling.pop("extra_body", {})
        fixed = {"model": ctx.model} | {name: sampling[name] for name in ("cache_salt",) if name in sampling}
        async with build_async_openai(ctx.client) as client:
            cards = (await client.get("/models", cast_to=dict[str, Any]))["data"]
            room = next((card.get("max_model_len") for card in cards if card["id"] == ctx.model), None)
            if room is None:
                raise InvalidRequest(f"{ctx.client.base_url}: no max_model_len for {ctx.model!r}; use a vLLM server")
            gateway = await live_gateway(
                model_dir,
                _sample,
                name="verifiers:vllm",
                sampling=_SAMPLING,
                max_context=room,
                logprobs_mode=self.logprobs_mode,
                directory=self.directory,
            )
            rollout = await gateway.run(
                imported(self.agent, "agent"),
                {**data.model_dump(), "mcp_urls": mcp_urls},
                group=str(trace.task.key or trace.task.hash),
                handle=(client, fixed),
                session_id=trace.id,
                pin={name: sampling[name] for name in ("temperature", "top_p", "top_k", "min_p") if name in sampling},
                default={"max_tokens": sampling["max_tokens"]} if "max_tokens" in sampling else None,
                stop_rule=self.stop_rule if trained else None,
            )
        if rollout.error is not None:
            raise rollout.error
        tokenizer, samples = gateway.renderer.tokenizer, rollout.samples
        nodes = verifiers_nodes(samples, lambda ids: read_text(tokenizer, ids), logprobs=trained)
        # Each turn has two nodes: its added tokens and its sampled tokens. Turns are in order of first occurrence.
        turns = dict.fromkeys(turn for sample in samples for turn in sample.turns)
        for node, turn in zip(nodes[1::2], turns, strict=True):
            node["message"] |= _message_fields(rollout.replies[turn])
        trace.nodes = [vf.MessageNode.model_validate(node) for node in nodes]
        trace.calls = [vf.ModelCall(model=ctx.model, **call) for call in _calls(samples)]
        if samples and samples[0].reward is not None:
            trace.record_reward("agent", samples[0].reward)
        return vf.ProgramResult(0, "", "")


async def _sample(server: tuple[Any, dict[str, Any]], prompt_ids: list[int], params: SamplingParams) -> SampleDelta:
    """Sample from vLLM's `/inference/v1/generate`, as `renderers.client.generate` does."""
    client, fixed_fields = server
    answer = await client.post(
        f"{str(client.base_url).rstrip('/').removesuffix('/v1')}/inference/v1/generate",
        cast_to=dict[str, Any],
        body={**fixed_fields, "token_ids": prompt_ids, "sampling_params": vllm_fields(params, _SAMPLING)},
        # A router sends calls with the same session id to the same server, which has their prefix in its KV cache.
        options={"headers": {"X-Session-ID": params.session_id}},
    )
    choice = answer["choices"][0]
    logprobs = (choice.get("logprobs") or {}).get("content") or ()
    return SampleDelta(
        tuple(choice["token_ids"]),
        tuple(entry["logprob"] for entry in logprobs),
        finish_reason_of(choice["finish_reason"]),
        weight_spans=tuple(WeightSpan(**span) for span in choice.get("weight_versions") or ()),
    )


def _calls(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    calls: dict[int, dict[str, Any]] = {}
    for sample in samples:
        for (turn, start, end), reason in zip(sample.completions(), sample.finish_reasons, strict=True):
            usage = {"prompt_tokens": start, "completion_tokens": end - start}
            # Each turn has two nodes, in this order of turns; the second has the sampled tokens.
            calls.setdefault(turn, {"node": 2 * len(calls) + 1, "finish_reason": reason, "usage": usage})
    return [calls[turn] for turn in sorted(calls)]


def _message_fields(reply: Message) -> dict[str, Any]:
    """Return the fields of a reply that the reward functions of a taskset read."""
    calls = [{"id": call["id"], **call["function"]} for call in reply.get("tool_calls") or ()]
    fields = {name: reply.get(name) for name in ("content", "reasoning_content")}
    return fields | {"tool_calls": calls or None}
