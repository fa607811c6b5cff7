"""The demo: a tiny model that calls tools, tasks for it, an agent, and a report on the record."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
