"""The demo: a tiny real model that calls tools, tasks for it, an agent, and a look at what was recorded."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
"""Folder of the tiny model."""
