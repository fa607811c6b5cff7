"""Folders of ten real tokenizers, each before servers of all ten: no true pair is refused, and every other one is."""

from __future__ import annotations

import asyncio
from functools import cache

import pytest

from tests.data import REAL
from tests.engines.stand_in import LanguageModel, StandIn
from tokentape.audit._served import CheckResult, FolderModel, likely_text, serves_model
from tokentape.chat._renderer import Renderer
from tokentape.engines._base import EngineInfo
from tokentape.engines._http import HttpClient
from tokentape.gateway._serve import running

FAMILIES = sorted(path.parent.name for path in REAL.glob("*/tokenizer.json"))
KIN = ({"deepseek_v3", "deepseek_v31"}, {"glm4_5", "qwen2_5", "qwen3"}, {"mistral_nemo", "nemotron3"})
"""Families that give most texts the same ids: only ids distinguish them, not the likelihood of a text."""
INFO = EngineInfo("vllm", "0.33.0", "m", 1 << 20, 4096, "raw_logprobs", frozenset(), scoring_paths=("/v1/completions",))

pytestmark = pytest.mark.real


@cache
def folder(family: str) -> Renderer:
    own = sorted((REAL / family / "templates").glob("*.jinja"))
    template = next((path for path in own if not path.name.startswith("fixed-")), own[0])
    return Renderer.load(REAL / family, template)


@cache
def model(family: str) -> LanguageModel:
    return LanguageModel(folder(family))


def crossed(server: str, families: list[str]) -> dict[str, tuple[list[CheckResult], CheckResult]]:
    """By folder: the startup checks against a server of `server`'s model, and the check by text alone."""

    async def run() -> dict[str, tuple[list[CheckResult], CheckResult]]:
        http = HttpClient(url)
        try:
            return {
                family: (
                    await serves_model("vllm", http, INFO, folder(family), FolderModel.read(REAL / family)),
                    await likely_text(http, INFO, folder(family)),
                )
                for family in families
            }
        finally:
            await http.close()

    standing = StandIn(folder(server), model(server), root=str(REAL / server), refuses=False)
    with running(standing.app) as url:
        return asyncio.run(run())


def kin(left: str, right: str) -> bool:
    return left == right or any({left, right} <= relatives for relatives in KIN)


@pytest.mark.slow
def test_llama_3_is_refused_for_a_server_of_deepseek_v3() -> None:
    """Two of the crossings below."""
    found = crossed("deepseek_v3", ["llama3", "deepseek_v3"])
    findings, text = found["llama3"]
    assert findings[0].status == text.status == "fail"
    findings, text = found["deepseek_v3"]
    assert [result.status for result in (*findings, text)] == ["ok"] * 4


@pytest.mark.slow
@pytest.mark.parametrize("server", FAMILIES)
def test_all_mismatched_pairs_are_refused_and_no_true_pair(server: str) -> None:
    found = crossed(server, FAMILIES)
    refused = {
        family for family, (findings, _) in found.items() if any(finding.status == "fail" for finding in findings)
    }
    assert refused == {*FAMILIES} - {server}
    assert all(finding.status == "ok" for finding in found[server][0]), found[server]
    # The text alone, for servers that do not reveal ids: the margin separates the right model from others.
    by_text = {family for family, (_, text) in found.items() if text.status == "fail"}
    assert by_text == {family for family in FAMILIES if not kin(family, server)}, found
