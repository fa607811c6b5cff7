"""Teams of AutoGen, with and without a model that selects the next speaker, and of Agno, whose leader delegates."""

from __future__ import annotations

import json
from pathlib import Path

from tests.harness.lineage.director import Asked, Cutting, Director, Said, run_script, tool_call

NAMES = ("writer", "critic", "editor")


def run(director: Director, cutting: Cutting, gateway: str, home: Path, folder: Path, seed: int) -> None:
    """Let 18 teams work."""
    rng, plan = director.rng, []
    teams: list[Team] = []
    for number in range(18):
        kind = ("round robin", "selector", "agno")[number % 3]
        team = Team(director, kind, rng.randint(4, 7))
        teams.append(team)
        address = f"{gateway}/sessions/team-{seed}-{number}/v1"
        plan.append([address, kind, [f"{director.text()} {one}" for one in team.members], team.task, team.messages])
    # The word of a member is in its system prompt, that of the team in its task.
    director.answer = lambda asked: next(
        one for one in teams if one.word in asked.prompt or any(name in asked.prompt for name in one.members)
    ).answer(asked)
    (home / "plan.json").write_text(json.dumps(plan))
    run_script("teams.py", "agno", home, folder, str(home / "plan.json"))


class Team:
    """What the engine says for the members of a team."""

    def __init__(self, director: Director, kind: str, messages: int) -> None:
        self.director, self.kind, self.messages = director, kind, messages
        self.word = director.word()
        self.task = f"{director.text(2)} {self.word}"
        self.members = [director.word() for _ in NAMES]
        """A word of each member's system prompt."""
        self.spoke: list[int] = []
        self.seen: set[str] = set()
        self.first: list[int] = []
        self.given: dict[str, list[int]] = {}

    def answer(self, asked: Asked) -> Said:
        """Answer a member, or choose one."""
        director = self.director
        text = f"{director.text(2)} {director.word()}"
        member = next((one for one in self.members if one in asked.system), None)
        if self.kind == "agno":
            return self._delegating(asked, text, member)
        if member is None:
            # The selector names a member only.
            words = f"{director.rng.choice(NAMES)}"
            return Said(words, "side_call", self.spoke[-1:] or self.first)
        kind, parents = (None, []) if member in self.seen or not self.spoke else ("subagent", self.spoke[-1:])
        self.seen.add(member)
        self.first += [] if self.first else [asked.number]
        self.spoke.append(asked.number)
        return Said(text, kind, parents)

    def _delegating(self, asked: Asked, text: str, member: str | None) -> Said:
        given = next((one for one in self.given if any(one in user for user in asked.users)), None)
        if given is not None:
            return Said(text, "subagent", self.given[given])
        if asked.since(self.word) >= 3:
            return Said(text)
        word = self.director.word()
        self.given[word] = [asked.number]
        name = self.director.rng.choice(NAMES[:2])
        return Said(tool_call("delegate_task_to_member", member_id=name, task=f"{self.director.text()} {word}"))
