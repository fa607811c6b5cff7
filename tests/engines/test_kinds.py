"""Engines opened by the name of their kind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest
import test_openai_compatible
from tests.engines import fake_llamacpp, fake_server, fake_sglang
from tests.engines.fake_server import FakeServer

from tokentape.engines._kinds import KINDS, open_engine
from tokentape.engines._pool import EnginePool
from tokentape.errors import InvalidRequest


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server.running() as fake:
        yield fake


@pytest.mark.parametrize(
    ("kind", "answers", "name"),
    [
        ("sglang", fake_sglang.answers(), "sglang"),
        ("llamacpp", fake_llamacpp.answers(), "llamacpp"),
        ("openai", test_openai_compatible.answers("vllm"), "openai:vllm"),
    ],
)
def test_each_kind_opens_its_engine(
    server: FakeServer, kind: str, answers: dict[str, fake_server.Answer], name: str
) -> None:
    server.reset(answers)

    async def main() -> str:
        engine = await open_engine(kind, server.url, vocab_size=100, api_key="sk-1")
        await engine.check()
        await engine.close()
        return engine.info.name

    assert asyncio.run(main()) == name
    assert server.headers["authorization"] == "Bearer sk-1"


@pytest.mark.parametrize(
    ("kind", "answers"),
    [
        ("sglang", fake_sglang.answers()),
        ("llamacpp", fake_llamacpp.answers()),
        ("openai", test_openai_compatible.answers("vllm")),
    ],
)
def test_each_kind_can_be_a_replica(server: FakeServer, kind: str, answers: dict[str, fake_server.Answer]) -> None:
    server.reset(answers)

    async def main() -> frozenset[str]:
        pool = await EnginePool.open({"only": partial(open_engine, kind, server.url, vocab_size=100)})
        await pool.close()
        return pool.info.sampling

    assert "session_id" in asyncio.run(main())


def test_unknown_kind_is_refused_with_the_known_kinds() -> None:
    with pytest.raises(InvalidRequest, match=f"expected one of {', '.join(KINDS)}"):
        asyncio.run(open_engine("tgi", "http://127.0.0.1:1", vocab_size=10))


def test_importing_kinds_loads_no_engine() -> None:
    code = "import sys, tokentape.engines._kinds; sys.exit(any('engines._vllm' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
