"""Measured programs, one file each."""

from __future__ import annotations

import os

from benchmarks.gateway.targets.agent_lightning import AgentLightning
from benchmarks.gateway.targets.base import Session, Site, Target
from benchmarks.gateway.targets.direct import Direct
from benchmarks.gateway.targets.litellm import LiteLlm
from benchmarks.gateway.targets.rllm import Rllm
from benchmarks.gateway.targets.tokentape import Tokentape
from benchmarks.gateway.targets.verifiers import Verifiers

__all__ = ["TARGETS", "Session", "Site", "Target"]

TARGETS: tuple[Target, ...] = (
    Direct(),
    Tokentape("full"),
    Tokentape("normal"),
    Tokentape("full", workers=2),
    *([Tokentape("full", workers=4)] if (os.cpu_count() or 1) >= 8 else []),
    Tokentape("full", replicas=2),
    Verifiers(),
    Rllm(cumulative=True),
    Rllm(cumulative=False),
    AgentLightning(),
    LiteLlm(),
)
"""The latency of the others is measured relative to the first one."""
