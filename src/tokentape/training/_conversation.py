"""Make a sample of a conversation that your own rollout loop sampled."""

from __future__ import annotations

import numpy as np

from tokentape._session.verdict import BRIDGE_UNCHECKED, NO_SUPPORTS, logprobs_reservation
from tokentape.chat import Conversation
from tokentape.errors import InvalidRequest
from tokentape.training._samples import Sample
from tokentape.types import Provenance, TokenDistribution


def conversation_sample(
    conversation: Conversation,
    *,
    name: str,
    sampled_from: TokenDistribution,
    logprobs_of: TokenDistribution | None = None,
    reward: float | None = None,
    group: str | None = None,
    weight_version: str = "unknown",
) -> Sample:
    """Return a sample that trains the completions of a conversation. Its session id is `name`.

    Each completion is a turn, numbered by the index of its reply in `conversation.messages`. `sampled_from` is the
    distribution that the engine sampled from, and `logprobs_of` that of its logprobs, by default the same:

    >>> hot = TokenDistribution(penalties=False, temperature=0.7, truncation=False, grammar=False)
    >>> sample = conversation_sample(conversation, name="task-7", sampled_from=hot, reward=1.0)    # doctest: +SKIP

    The verdict begins with `exact`, or with `closed` if a bridge ended a turn that the model had not ended. It has
    `bridge unchecked` if there is a bridge between completions and no `check_bridges`.

    Raises `InvalidRequest` if nothing was sampled, or if a completion has no logprobs.
    """
    completions, logprobs = conversation.completions, conversation.logprobs
    if not completions:
        raise InvalidRequest("the conversation has no completion: call add_completion", "conversation")
    if missing := [n for n, start, end in completions if np.isnan(logprobs[start:end]).any()]:
        where = f"the completions of messages {missing}"
        raise InvalidRequest(f"{where} have no logprobs: pass `logprobs` to add_completion", "conversation")
    logprobs_of = logprobs_of or sampled_from
    verdict = [
        "closed" if (conversation.provenance == Provenance.CLOSE).any() else "exact",
        BRIDGE_UNCHECKED if len(completions) > 1 and not conversation.check_bridges else "",
        logprobs_reservation(sampled_from, logprobs_of),
        NO_SUPPORTS if logprobs_of.truncation else "",
    ]
    stops = conversation.stop_ids
    stopped = [bool(stops.intersection(conversation.sampled[n][-1:].tolist())) for n, _, _ in completions]
    return Sample(
        session_id=name,
        leaf=completions[-1][0],
        token_ids=conversation.token_ids,
        provenance=conversation.provenance,
        loss_mask=conversation.loss_mask,
        logprobs=logprobs,
        turns=tuple(n for n, _, _ in completions),
        completion_starts=np.array([start for _, start, _ in completions], np.int32),
        completion_ends=np.array([end for _, _, end in completions], np.int32),
        weight_versions=(weight_version,) * len(completions),
        reward=reward,
        verdict=", ".join(filter(None, verdict)),
        metadata={},
        turn_rewards=np.full(len(completions), np.nan),
        weight_spans=tuple((start, end, weight_version) for _, start, end in completions if start < end),
        sampled_from=(sampled_from,) * len(completions),
        logprobs_of=(logprobs_of,) * len(completions),
        finish_reasons=tuple("stop" if ended else None for ended in stopped),
        group=group,
    )
