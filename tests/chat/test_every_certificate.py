"""The certificate of each pair of template and tokenizer, compared with other code."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest

from tests.chat.conftest import CERTIFIED, OFTEN_CERTIFIED, load_certificate, load_renderer, model_path, slow_unless
from tests.data import HAVE_REAL, REAL
from tokentape.chat import _grammar as grammar
from tokentape.chat._certificate import Certificate
from tokentape.errors import TemplateRefused

NOT_READ = {
    # It writes null within a list as no text.
    "real/minimax_m2/templates/MiniMax-M3.jinja": {"typed arguments"},
}
NO_TOOLS = {"gemma3/templates/turns.jinja"}
"""Refuses results of tools."""

each_template = pytest.mark.parametrize("template", CERTIFIED)


@each_template
def test_templates_are_safe_against_forged_control_tokens(template: str) -> None:
    assert load_certificate(template).injection_safe


@each_template
def test_every_turn_that_a_template_writes_is_read_back(template: str) -> None:
    # If arguments are bare text, null and its spelling look the same.
    failed = {check.name for check in load_certificate(template).parsing if check.holds is False} - {"null argument"}
    assert failed == NOT_READ.get(template, set())


@each_template
def test_user_and_tool_continuations_are_certified_if_supported(template: str) -> None:
    for continuation in ("user", "user/no-tools") if template in NO_TOOLS else ("user", "tool"):
        certified = load_certificate(template).continuation(continuation)
        assert certified is not None
        assert certified.strategy != "refused", certified.reason


@each_template
def test_local_bridges_equal_the_tail_of_the_whole_rendering(template: str) -> None:
    """Also for conversations without tools: `local` bridges are compared with the real history."""
    renderer = load_renderer(template)
    setup = grammar.setup(renderer.fingerprint, {}, tools=())
    for certified in load_certificate(template).continuations:
        if certified.strategy != "local" or "/" not in certified.name:
            continue
        for history, reply, new in list(grammar.conversations(certified.name))[::5]:
            with suppress(TemplateRefused):
                full = renderer.render_text([*history, reply, *new], setup, generate=True)
                assert full.endswith(renderer.suffix(reply, new, setup)), certified.name


@each_template
def test_certificates_round_trip_through_json(template: str) -> None:
    certificate = load_certificate(template)
    assert Certificate.from_json(certificate.to_json()) == certificate


# Whether a next user message and a tool result keep the earlier text. Computed by other code that compares full
# renderings of a conversation.
KEEPS = {
    "qwen2_5/templates/Qwen2.5-Instruct.jinja": (True, True),
    "qwen3/templates/QwQ-32B.jinja": (False, False),
    "qwen3/templates/Qwen3.jinja": (False, False),
    "qwen3/templates/Qwen3-Apr2025.jinja": (False, False),
    "qwen3/templates/Qwen3-Instruct-2507.jinja": (True, True),
    "qwen3/templates/Qwen3-Thinking-2507.jinja": (False, False),
    "qwen3/templates/Qwen3-Coder.jinja": (True, True),
    "qwen3/templates/Qwen3-VL.jinja": (True, True),
    "qwen3/templates/fixed-trl-qwen3_training.jinja": (True, True),
    "gpt_oss/templates/gpt-oss.jinja": (False, True),
    "mistral_v3_spm/templates/v3_spm.jinja": (False, True),
    "mistral_v3_spm/templates/v7_spm.jinja": (False, True),
    "mistral_nemo/templates/v3.jinja": (False, True),
    "mistral_nemo/templates/HF-Mistral-Nemo-2407.jinja": (False, False),
    "mistral_nemo/templates/HF-Mistral-Small-3.2.jinja": (False, True),
}


def kept(certificate: Certificate) -> tuple[bool, ...]:
    """Return whether a user message and a tool result are append-only, or may be."""
    continuations = [certificate.continuation(name) for name in ("user", "tool")]
    return tuple(continuation is not None and continuation.append_only != "no" for continuation in continuations)


@pytest.mark.parametrize("template", [slow_unless(name, *OFTEN_CERTIFIED) for name in KEEPS])
def test_append_only_agrees_with_an_independent_table(template: str) -> None:
    assert kept(load_certificate(template)) == KEEPS[template]


ROWS = json.loads((REAL / "prefix_map.json").read_text(encoding="utf-8"))["rows"] if HAVE_REAL else []
# The certificate probes more: a tool call right after a tool result, where DeepSeek-V3 writes no header, and for R1 an
# answer without one, where the prompt opens reasoning.
TRIED_MORE = {"deepseek_v3": (True, False), "deepseek_v31": (False, False)}


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if not row["kw"] and "*" not in row["label"] and (REAL / row["template"]).exists()] or [None],
    ids=lambda row: row and row["label"],
)
def test_append_only_of_real_pairs_agrees_with_an_independent_table(row: dict[str, str]) -> None:
    columns = (("UT", "RTU"), ("TL", "RT"))
    table = tuple(all(row[name] in "✓∅" for name in names) and row[names[0]] == "✓" for names in columns)
    flags = kept(load_certificate(f"real/{row['template']}"))
    assert flags == table or flags == TRIED_MORE[row["template"].split("/")[0]]


@pytest.mark.real
@pytest.mark.slow
def test_independent_table_holds_for_common_pairs() -> None:
    assert model_path("real/qwen3").is_dir()
    assert sum(not row["kw"] and "*" not in row["label"] for row in ROWS) >= 20
