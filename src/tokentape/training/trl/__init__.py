"""Train with TRL on exact ids; see docs/how-to/train-with-trl.md. Importing it loads neither TRL nor torch."""

from tokentape.training.trl._agents import Agent, Row, carry_rows
from tokentape.training.trl._asynchronous import GatewayTransfer, GatewayWorker, PolicyTransfer
from tokentape.training.trl._environments import EnvironmentAgent
from tokentape.training.trl._rollout_func import GatewayRollouts, correct_by_recorded_logprobs, recorded_reward
from tokentape.training.trl._serving import Policy, serving

__all__ = [
    "Agent", "EnvironmentAgent", "GatewayRollouts", "GatewayTransfer", "GatewayWorker", "Policy", "PolicyTransfer",
    "Row", "carry_rows", "correct_by_recorded_logprobs", "recorded_reward", "serving",
]  # fmt: skip
