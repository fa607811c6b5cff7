"""The suite of other projects' models reports planted faults, and nothing for correct models."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chat import named_models
from tests.chat.conftest import SMALL
from tests.generator.planted import AlwaysLocal, OneWrongToken
from tests.generator.product import Product

pytestmark = pytest.mark.usefixtures("quick_proofs")

SWITCH = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and '/brief' in messages[0].content %}<think>

</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if '/brief' in messages[0].content %}<think>

</think>

{% endif %}{% endif %}"""
"""A word in the first message decides how every prompt ends, and every turn begins."""
FRAMED = """{% for m in messages %}<|turn|>{{ m.role }}{% if m.role == 'assistant' %}<|say|>{{ m.content }}<|said|>
{%- else %}{{ m.content }}{% endif %}<|over|>{% endfor %}{% if add_generation_prompt %}<|turn|>assistant{% endif %}"""
"""Content has delimiters within the turn."""


def kinds(source: str, folder: Path, count: int = 12) -> dict[str, int]:
    (folder / "one.jinja").write_text(source, encoding="utf-8")
    (folder / "one.json").write_text('{"eos_token": "<|im_end|>"}' if source == SWITCH else '{"eos_token": "<|over|>"}')
    ((name, model),) = named_models.folders(folder, folder / "scratch")
    all_findings = named_models.judge(name, model, range(10 * count), count, {}).findings
    return {
        kind: sum(finding.kind == kind for finding in all_findings)
        for kind in {finding.kind for finding in all_findings}
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize("source", [SWITCH, FRAMED])
def test_correct_models_have_no_findings(source: str, tmp_path: Path) -> None:
    assert kinds(source, tmp_path, 40) == {}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("product", "kind"), [(AlwaysLocal, "false local"), (OneWrongToken, "wrong bridge")])
def test_planted_fault_is_reported(
    product: type[Product], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_models, "Product", product)
    assert kind in kinds(SWITCH, tmp_path, 40)


@pytest.mark.slow
def test_model_folder_is_used_unchanged(tmp_path: Path) -> None:
    model = tmp_path / "models" / "mine"
    model.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).symlink_to(SMALL / "qwen3" / name)
    (model / "chat_template.jinja").symlink_to(SMALL / "qwen3" / "templates" / "Qwen3.jinja")
    ((name, folder),) = named_models.folders(tmp_path / "models", tmp_path / "scratch")
    judged = named_models.judge(name, folder, range(40), 4, {})
    assert judged.findings == []
    assert judged.counts["random completions"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_models_of_other_projects() -> None:
    folder = os.environ.get("TOKENTAPE_NAMED_MODELS")
    if folder is None:
        pytest.skip("needs a folder with models or templates: TOKENTAPE_NAMED_MODELS")
    assert named_models.run(Path(folder), 200) == 0
