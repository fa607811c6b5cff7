"""Histories that LangGraph and openai-agents edit: other questions, other replies, cleared results."""

from __future__ import annotations

import json
from pathlib import Path

from tests.harness.lineage.director import Answer, Cutting, Director, Request, run_script, tool_call


def run(director: Director, cutting: Cutting, gateway: str, home: Path, folder: Path, seed: int) -> None:
    """Hold 24 conversations with two edits each."""
    rng = director.rng
    scripts: dict[str, list[str]] = {}
    edits: dict[str, tuple[str, str]] = {}
    """By the word of a message: the edit before it, and the word of the previous message."""
    calls: dict[str, list[int]] = {}

    def answer(request: Request) -> Answer:
        word = max(
            (script for script in scripts if any(script in user for user in request.users)), key=request.prompt.rfind
        )
        at = request.since(word)
        calls.setdefault(word, []).append(request.number)
        kind, parents = None, list[int]()
        if word in edits and not at:
            how, before = edits[word]
            kind = "edit"
            # What was replaced, or the newest turns of the history that was edited.
            parents = calls[before][:1] if how == "rewind" else calls[before][-2:]
        return Answer(f"{scripts[word][min(at, len(scripts[word]) - 1)]} {director.word()}", kind, parents)

    director.answer = answer
    plan = []
    for number in range(24):
        framework = "langgraph" if number % 3 else "openai-agents"
        steps, word = [["system", director.text(2)]], ""
        for at in range(5):
            how = rng.choice(("rewind", "reply", "result") if framework == "langgraph" else ("rewind",))
            how = how if at in (2, 4) else "ask"
            before, word = word, director.word()
            look = tool_call("look", item=director.word())
            scripts[word] = [*[look] * (framework == "langgraph"), director.text(2)]
            if how != "ask":
                edits[word] = how, before
            if how in ("reply", "result"):
                steps.append([how, director.text()])
                how = "ask"
            steps.append([how, f"{director.text()} {word}"])
        plan.append([f"{gateway}/sessions/{framework}-{seed}-{number}/v1", framework, steps])
    (home / "plan.json").write_text(json.dumps(plan))
    run_script("edited.py", "langgraph", home, folder, str(home / "plan.json"))
