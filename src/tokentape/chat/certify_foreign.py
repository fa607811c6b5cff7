"""What holds for an overriding renderer: its bridges tried on the grammar, by ids alone since that is all it shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokentape.chat import grammar
from tokentape.chat.certificate import Continuation, Strategy
from tokentape.chat.foreign_renderer import ForeignRenderer
from tokentape.chat.renderer import Renderer
from tokentape.errors import InvariantViolation, TemplateRefused
from tokentape.types import Message, Setup, TokenIds


def foreign_continuation(renderer: Renderer, foreign: ForeignRenderer, setup: Setup, name: str) -> Continuation:
    """What was found for one kind of new messages.

    `fork` where it has no bridge for some conversation that it renders, `refused` where a bridge would change what came
    before.
    """
    strategy: Strategy = "local"
    refusal = "no conversation with it was taken"
    tried = 0
    rewritten: tuple[str, tuple[Message, ...]] | None = None
    for history, reply, new in grammar.conversations(name):
        whole = (*history, reply, *new)
        try:
            completion_ids = _completion(renderer, foreign, setup, history, reply)
            context_ids = np.concatenate([renderer.render(history, setup).ids, completion_ids])
            full_ids = renderer.render(whole, setup).ids
            added = renderer.bridge(completion_ids, reply, new, setup, context_ids=context_ids)
        except InvariantViolation as error:
            return Continuation(name, "refused", "no", tried, str(error), whole)
        except TemplateRefused as error:
            strategy, added = "fork", None
            rewritten = rewritten or (str(error), whole)
        except Exception as error:  # whatever somebody else's code raises for messages that it does not take
            refusal = f"the overriding renderer failed with {type(error).__name__}"
            continue
        tried += 1
        if added is not None and not np.array_equal(np.concatenate([context_ids, added.ids]), full_ids):
            rewritten = rewritten or ("it renders the whole conversation differently than it bridges it", whole)
    if not tried:
        return Continuation(name, "refused", append_only="no", tried=0, reason=refusal)
    if rewritten is None:
        return Continuation(name, strategy, append_only="yes", tried=tried, reason="")
    return Continuation(name, strategy, "no", tried, *rewritten)


def _completion(
    renderer: Renderer, foreign: ForeignRenderer, setup: Setup, history: Sequence[Message], reply: Message
) -> TokenIds:
    """Ids of a turn as it renders them behind its own prompt, else those of the bare content; up to a stop token."""
    prompt_ids = renderer.render(history, setup).ids.tolist()
    tools = list(setup.tools) or None
    spoken = list(foreign.render_ids([dict(m) for m in (*history, reply)], tools=tools, add_generation_prompt=False))
    stop_ids = renderer.stop_ids(setup)
    if spoken[: len(prompt_ids)] == prompt_ids:
        turn = spoken[len(prompt_ids) :]
    else:
        turn = [*renderer.tokenizer.encode_after_control(reply.get("content") or "").ids, *sorted(stop_ids)[:1]]
    stops = [at for at, token_id in enumerate(turn) if token_id in stop_ids]
    return renderer.tokenizer.array(turn[: stops[0] + 1] if stops else turn)
