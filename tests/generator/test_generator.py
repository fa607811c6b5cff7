"""Cases depend on their seed only, and every option makes a difference that renders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.generator.__main__ import run
from tests.generator.causes import Cause, reduce
from tests.generator.compose import compose
from tests.generator.conversations import Conversation, constants_of, conversations
from tests.generator.examine import case_of, examine, template_of
from tests.generator.mutate import MUTATIONS, mutate
from tests.generator.options import FEATURES, TEMPLATE, TOKENIZER, Case, draw, only
from tests.generator.oracle import Reference
from tests.generator.vocabularies import tokenizer_json, write_model

pytestmark = pytest.mark.usefixtures("quick_proofs")

PLAIN = only(draw(1, 0), [])
NEEDS = {
    "switch_effect": ["switch=any_user", "thinking=kept"],
    "think_tags": ["thinking=kept"],
    "values": ["calls=tagged_parameters"],
    "eos_list": ["end=calls_other"],
    "trained_on": ["vocabulary=bpe_spaces"],
}
"""What a feature shows together with only."""
RARE, MANY = ("strict", "result_label"), 100
"""Conversations in which rare kinds of messages occur."""


def test_a_seed_makes_the_same_case_template_tokenizer_and_conversations() -> None:
    left, right = case_of(7, 3), case_of(7, 3)
    assert left == right
    assert template_of(left) == template_of(right)
    assert tokenizer_json(left, template_of(left)) == tokenizer_json(right, template_of(right))
    made = [conversations(case.random, template_of(case).source, ["<x>"], range(5)) for case in (left, right)]
    assert made[0] == made[1]


@pytest.mark.slow
@pytest.mark.parametrize("feature", [name for name in TEMPLATE if name != "keyword"])
def test_every_option_of_a_template_changes_the_rendering(feature: str, tmp_path: Path) -> None:
    texts = []
    for option in TEMPLATE[feature]:
        case = only(PLAIN, [*NEEDS.get(feature, []), f"{feature}={option}"])
        reference = Reference(write_model(case, compose(case), tmp_path / option), {})
        made = conversations(
            case.random, f"{{% if {case.word!r} in x %}}{{% endif %}}", [], range(MANY if feature in RARE else 30)
        )
        texts.append("".join(_rendered(reference, conversation) for conversation in made))
    assert len(set(texts)) == len(texts)


def _rendered(reference: Reference, conversation: Conversation) -> str:
    try:
        return "".join(
            reference.render([*conversation.history, *more], conversation.tools, generate=generate)
            for more, generate in (
                ((), True),
                ((), False),
                ((conversation.reply,), False),
                ((conversation.reply, *conversation.new), True),
            )
        )
    except Exception as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("feature", TOKENIZER)
def test_every_option_of_a_tokenizer_changes_the_files(feature: str, tmp_path: Path) -> None:
    files = []
    for option in TOKENIZER[feature]:
        case = only(PLAIN, [*NEEDS.get(feature, []), f"{feature}={option}"])
        folder = write_model(case, compose(case), tmp_path / option)
        files.append("".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.json"))))
    assert len(set(files)) == len(files)


def test_cases_differ_in_more_than_fifteen_features() -> None:
    cases = [draw(3, index) for index in range(800)]
    assert len(TEMPLATE) >= 15
    for feature, options in FEATURES.items():
        assert {case.options[feature] for case in cases} == set(options)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_changes_a_template(name: str) -> None:
    source = (
        "{%- for message in messages %}{%- if loop.first %}{{- '<|im_start|>' }}{% endif %}{{ '<|im_end|>\\n' }}"
        "{{ message.content }}{{ message.content | trim }}{%- for call in message.tool_calls %}{{ call }}{% endfor %}"
        "{% endfor %}"
    )
    assert mutate(source, name, PLAIN.random(name)) != source


def test_strings_that_a_template_looks_for_are_found() -> None:
    source = "{% if '/no_think' in m.content or m.content.startswith('[fast]') or x == 'slow' %}{{ 'text' }}{% endif %}"
    assert constants_of(source) == ["/no_think", "[fast]", "slow"]


def test_finding_is_reduced_to_the_options_it_needs() -> None:
    case = next(case for case in (draw(1, index) for index in range(100)) if len(case.cause) > 8)
    needed = set(case.cause[:1] + case.cause[-1:])

    def kinds_of(tried: Case) -> set[str]:
        return {"fault"} if needed <= set(tried.cause) else set()

    assert set(reduce(case, "fault", kinds_of)) == needed
    assert Cause("fault", tuple(needed), 1, 1, "").explains("fault", case.cause)
    assert not Cause("fault", ("numbering=never",), 1, 1, "").explains("fault", case.cause)


@pytest.mark.slow
def test_stopped_run_resumes(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole.jsonl", tmp_path / "stopped.jsonl"
    expected = run(5, 2, 1, whole, processes=1)
    lines = whole.read_text(encoding="utf-8").splitlines()
    stopped.write_text(lines[0] + "\n" + lines[1][:40] + "\n", encoding="utf-8")
    again = run(5, 2, 1, stopped, processes=1)
    assert [without_time(result) for result in again] == [without_time(result) for result in expected]
    assert [json.loads(line)["index"] for line in lines] == [0, 1]


def without_time(result: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in result.items() if key != "seconds"}


@pytest.mark.slow
def test_some_cases_are_examined() -> None:
    for index in (0, 2):
        assert examine(case_of(2, index), 4).counts


@pytest.mark.slow
def test_append_only_covers_calls_left_unanswered() -> None:
    # The prompt ends with `] `, which the tokenizer joins with the `<` of a call.
    options = ["header=inst", "end=three", "separator=nothing", "prompt=think_empty", "channels=plan_and_final"]
    result = examine(only(case_of(32, 630), options), numbers=range(8))
    assert "false append-only" not in result.kinds


MENDED = (
    "71:374 the prompt of the second question has another number than the word that opens reasoning",
    "71:533 new messages hide that the history says what the template looks for",
    "71:764 the token that closes a call also ends the turn, and was sampled once",
    "71:914 there is no generation prompt, and the last question is marked",
    "71:957 the longer of two delimiters begins before the other one and arrives later",
    "71:968 a role of which the template writes no header",
    "73:54 white space ends a turn, and the content too",
    "73:65 content after calls begins otherwise in the last turn",
    "91:10 only the last turn says a word between reasoning and content",
    "91:13 the frame of a content that follows reasoning which was cut short",
    "92:2 a vocabulary has a text twice, so all added tokens have other ids",
    "91:39 reasoning that is not shown again is spelled elsewhere",
    "91:45 the token that ends a turn takes the line break along",
    "92:16 the prompt is always written, and the last question is marked",
    "94:8 no control token stands between a question's line break and the turn",
    "94:27 the template looks for more strings than eight",
    "104:135 a template fails on replies without content, so another one shows what depends on the history",
    "104:236 the line breaks of a content and of the turn's end are one token",
    "104:180 the close of reasoning that the prompt opens is followed by a word in the last turn only",
    "104:335 a mutation takes a token out of the template, so callers may make it",
    "104:688 a new message says what changes the messages before it",
    "104:302 what opens reasoning stands in every header, closed at once",
    "104:265 what opens reasoning, and is no tag, opens content too",
    "104:103 three results are more messages than the template counts to",
    "105:515 a header is written twice before a turn",
    "105:647 the prompt opens a turn beside tools only",
    "105:890 the last question is marked, so the header begins otherwise",
    "105:945 a reply that was cut short is spelled in the next prompt",
    "94:12 the certificate says that the text null is not read back",
    "113:559 the cut content is part of what the template writes itself",
    "113:585 the prompt is always written, the last question is marked, and the frame of a content follows reasoning",
    "113:743 the cut content ends as the next header begins",
    "115:672 the content's header closes reasoning, and the last turn says a word more",
    "115:902 what ends messages stands before the question too, and the prompt is always written",
    "117:630 what ends messages stands before the question too, and no prompt is written",
    "119:106 a bridge begins with text where the tokenizer puts a space before every text",
)
"""Cases that showed a fault once, and which."""


@pytest.mark.slow
@pytest.mark.parametrize("case", MENDED)
def test_fixed_case_shows_no_fault(case: str) -> None:
    seed, index = map(int, case.partition(" ")[0].split(":"))
    assert examine(case_of(seed, index)).findings == []


def test_bridge_text_is_encoded_as_a_continuation_of_the_completion() -> None:
    # SentencePiece-style tokenizers put a space before a text's first word, which a bridge after text must not have.
    assert examine(case_of(119, 106)).findings == []
