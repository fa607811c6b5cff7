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
"""Families that give most texts the same ids: only ids tell them apart, not how likely a text is."""
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
    """By folder: what a start finds out of a server of `server`'s model, and what the text alone tells."""

    async def run() -> dict[str, tuple[list[CheckResult], CheckResult]]:
        http = HttpClient(url)
        try:
            return {
                one: (
                    await serves_model("vllm", http, INFO, folder(one), FolderModel.read(REAL / one)),
                    await likely_text(http, INFO, folder(one)),
                )
                for one in families
            }
        finally:
            await http.close()

    standing = StandIn(folder(server), model(server), root=str(REAL / server), refuses=False)
    with running(standing.app) as url:
        return asyncio.run(run())


def kin(one: str, other: str) -> bool:
    return one == other or any({one, other} <= relatives for relatives in KIN)


@pytest.mark.slow
def test_llama_3_before_a_server_of_deepseek_v3_is_refused_and_its_own_is_not() -> None:
    """Two of the crossings below."""
    found = crossed("deepseek_v3", ["llama3", "deepseek_v3"])
    findings, text = found["llama3"]
    assert findings[0].status == text.status == "fail"
    findings, text = found["deepseek_v3"]
    assert [one.status for one in (*findings, text)] == ["ok"] * 4


@pytest.mark.slow
@pytest.mark.parametrize("server", FAMILIES)
def test_all_crossings_are_refused_and_no_true_pair(server: str) -> None:
    found = crossed(server, FAMILIES)
    refused = {one for one, (findings, _) in found.items() if any(finding.status == "fail" for finding in findings)}
    assert refused == {*FAMILIES} - {server}
    assert all(finding.status == "ok" for finding in found[server][0]), found[server]
    # The text alone, should a server not tell its ids: the margin lies between what is right and what is strange.
    by_text = {one for one, (_, text) in found.items() if text.status == "fail"}
    assert by_text == {one for one in FAMILIES if not kin(one, server)}, found
