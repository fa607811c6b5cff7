"""The independent features of a generated case, each with its options, and how a case is drawn from a seed.

The first option of each feature is its default: the plainest there is. A finding is reduced by setting features back to
their defaults one by one, so what is left names its cause.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

TEMPLATE: Mapping[str, tuple[str, ...]] = {
    "header": ("chatml", "llama", "role_token", "fullwidth", "text", "model_turn", "inst"),
    "end": ("token", "assistant_only", "last_other", "calls_other", "three", "none"),
    "separator": ("newline", "nothing"),
    "bos": ("none", "token"),
    "system": ("in_place", "merged_first", "first_user", "last_user", "with_default"),
    "tools": ("system", "own_block", "first_user", "last_user", "ignored"),
    "thinking": ("none", "kept", "last_only", "after_last_user", "always_shown"),
    "think_tags": ("lines", "tight", "brackets"),
    "prompt": ("plain", "think_open", "think_empty", "always", "none"),
    "calls": (
        *("hermes", "tagged_parameters", "key_value_tags", "python", "name_space_json", "name_newline_json"),
        *("token_json", "pipe_json", "semicolons", "bare_json", "header_per_call", "json_array", "typed_tags"),
        "ignored",
    ),
    "call_label": ("none", "id", "index", "running"),
    "result": ("own_turn", "grouped_in_user", "bare_tags", "json_lines"),
    "result_label": ("none", "name", "name_by_id", "id", "number_by_id", "running"),
    "numbering": ("none", "messages", "user_turns"),
    "switch": ("none", "system", "any_user", "last_user", "any_message", "first_message"),
    "switch_effect": ("prompt", "user_suffix", "thinking"),
    "trim": ("none", "all", "assistant_newlines", "assistant_end", "users"),
    "date": ("none", "system", "users", "prompt"),
    "beside": ("before", "after", "dropped", "after_results"),
    "values": ("text_or_json", "json", "text_or_python"),
    "count": ("none", "prompt_when_long", "system_says", "last_user_marked"),
    "last_assistant": ("none", "left_open", "marked"),
    "strict": ("none", "alternating", "system_first"),
    "channels": ("none", "framed", "plan_and_final"),
    "keyword": ("none", "thinking_off", "thinking_on"),
}
"""Features of a composed template."""

TOKENIZER: Mapping[str, tuple[str, ...]] = {
    "vocabulary": ("byte_level", "byte_level_split", "bpe_spaces", "bpe_prefix", "unigram", "unigram_prefix"),
    "placement": ("after", "front"),
    "spaces": ("none", "plain_runs", "underline_runs"),
    "html": ("none", "tags"),
    "flags": ("all_special", "mixed", "strip_right"),
    "trained_on": ("text", "markup"),
    "eos_list": ("one", "several"),
    "normal_form": ("none", "nfc"),
}
"""Features of a generated tokenizer."""

FEATURES: Mapping[str, tuple[str, ...]] = {**TEMPLATE, **TOKENIZER}
_DEFAULT_SHARES = (0.5, 0.7, 0.85, 0.93)
"""Of the features, how many a case leaves at their defaults: some cases mix much, others little."""
_WORDS = ("/no_think", "/think", "/brief", "detailed thinking off", "[terse]", "mode: fast")


@dataclass(frozen=True)
class Case:
    """One template and tokenizer, by seed and index; `options` holds each feature's option."""

    seed: int
    index: int
    options: Mapping[str, str] = field(hash=False)
    base: str = ""
    """Name of the real template that is mutated; empty for a composed one."""
    mutations: tuple[str, ...] = ()
    word: str = field(default=_WORDS[0], compare=False)
    """What a switch listens to."""

    @property
    def changed(self) -> dict[str, str]:
        """The options that are not the default ones."""
        return {name: option for name, option in self.options.items() if option != FEATURES[name][0]}

    @property
    def cause(self) -> list[str]:
        """Everything that makes this case differ from the plainest one, as strings."""
        found = [f"{name}={option}" for name, option in self.changed.items()]
        return found + ([f"base={self.base}"] if self.base else []) + [f"mutation={name}" for name in self.mutations]

    def random(self, purpose: str) -> random.Random:
        """A generator of random numbers that depends on seed, index and purpose only."""
        return random.Random(f"{self.seed}:{self.index}:{purpose}")


def defaults() -> dict[str, str]:
    return {name: options[0] for name, options in FEATURES.items()}


def draw(
    seed: int,
    index: int,
    bases: Sequence[str] = (),
    others: Sequence[str] = (),
    mutations: Sequence[str] = (),
) -> Case:
    """Draw a case: every fourth mutates one of `bases` or, as often, of `others`, which not every machine has."""
    rng = random.Random(f"{seed}:{index}:options")
    share = rng.choice(_DEFAULT_SHARES)
    options = {
        name: choices[0] if rng.random() < share else rng.choice(choices[1:]) for name, choices in FEATURES.items()
    }
    word = random.Random(f"{seed}:{index}:word").choice(_WORDS)
    if not bases or index % 4 != 3:
        return Case(seed, index, options, word=word)
    options |= {name: choices[0] for name, choices in TEMPLATE.items() if name != "keyword"}
    chosen = tuple(rng.choice(mutations) for _ in range(rng.choice((0, 1, 1, 2, 3)))) if mutations else ()
    base = rng.choice(bases)
    if rng.random() < 0.5 and others:
        base = others[int(rng.random() * len(others))]
    return Case(seed, index, options, base, tuple(dict.fromkeys(chosen)), word)


def only(case: Case, causes: list[str]) -> Case:
    """The same case with everything at its default but `causes`, strings as `Case.cause` has them."""
    named = [cause.partition("=")[::2] for cause in causes]
    options = defaults() | {name: option for name, option in named if name in FEATURES}
    base = next((option for name, option in named if name == "base"), "")
    return Case(case.seed, case.index, options, base, tuple(o for name, o in named if name == "mutation"), case.word)
