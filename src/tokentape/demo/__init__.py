"""The demo: a tiny model that calls tools, tasks, an agent, and a report on the recorded run."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
