"""Teams of AutoGen, with and without a model that selects the next speaker, and of Agno, whose leader delegates."""

from __future__ import annotations

import json
from pathlib import Path

from tests.harness.lineage.director import Answer, Cutting, Director, Request, run_script, tool_call

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
        plan.append(
            [address, kind, [f"{director.text()} {member}" for member in team.members], team.task, team.messages]
        )
    # The word of a member is in its system prompt, that of the team in its task.
    director.answer = lambda request: next(
        team for team in teams if team.word in request.prompt or any(name in request.prompt for name in team.members)
    ).answer(request)
    (home / "plan.json").write_text(json.dumps(plan))
    run_script("teams.py", "agno", home, folder, str(home / "plan.json"))


class Team:
    """The engine's replies for the members of a team."""

    def __init__(self, director: Director, kind: str, messages: int) -> None:
        self.director, self.kind, self.messages = director, kind, messages
        self.word = director.word()
        self.task = f"{director.text(2)} {self.word}"
        self.members = [director.word() for _ in NAMES]
        """A word of each member's system prompt."""
        self.spoke: list[int] = []
        self.seen: set[str] = set()
        self.first: list[int] = []
        self.delegated: dict[str, list[int]] = {}

    def answer(self, request: Request) -> Answer:
        """Answer a member, or choose one."""
        director = self.director
        text = f"{director.text(2)} {director.word()}"
        member = next((member for member in self.members if member in request.system), None)
        if self.kind == "agno":
            return self._delegating(request, text, member)
        if member is None:
            # The selector names a member only.
            words = f"{director.rng.choice(NAMES)}"
            return Answer(words, "side_call", self.spoke[-1:] or self.first)
        kind, parents = (None, []) if member in self.seen or not self.spoke else ("subagent", self.spoke[-1:])
        self.seen.add(member)
        self.first += [] if self.first else [request.number]
        self.spoke.append(request.number)
        return Answer(text, kind, parents)

    def _delegating(self, request: Request, text: str, member: str | None) -> Answer:
        known = next((word for word in self.delegated if any(word in user for user in request.users)), None)
        if known is not None:
            return Answer(text, "subagent", self.delegated[known])
        if request.since(self.word) >= 3:
            return Answer(text)
        word = self.director.word()
        self.delegated[word] = [request.number]
        name = self.director.rng.choice(NAMES[:2])
        return Answer(tool_call("delegate_task_to_member", member_id=name, task=f"{self.director.text()} {word}"))
