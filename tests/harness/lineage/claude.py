"""Claude Code in one process for many messages: agents, `/compact`, titles, side questions, rewinds, failures."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import uuid
from pathlib import Path
from queue import Queue
from typing import Any

from tests.harness.lineage.director import Answer, Cutting, Director, Request, tool_call
from tests.harness.scripted_agents import OFFLINE, program_of

AGENT = {"name": "Agent", "subagent_type": "general-purpose", "run_in_background": False}


class Claude:
    """A process of Claude Code that takes messages and requests as lines of JSON."""

    def __init__(self, url: str, home: Path, folder: Path, hints: bool) -> None:
        program = program_of("claude", "@anthropic-ai/claude-code")
        assert program is not None
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "TMPDIR": str(home),
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
            "NO_PROXY": "127.0.0.1,localhost",
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9"),
            **OFFLINE,
            **({"CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1"} if hints else {}),
        }
        arguments = "-p --input-format stream-json --output-format stream-json --verbose --model m --allowedTools Read"
        with (home / "errors").open("w") as errors:
            self.process = subprocess.Popen(
                [program, *arguments.split()],
                env=environment,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.lines = Queue[dict[str, Any] | None]()
        self.seen: list[dict[str, Any]] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            for line in stdout:
                self.lines.put(json.loads(line))
        self.lines.put(None)

    def _until(self, *kinds: str) -> dict[str, Any]:
        while True:
            line = self.lines.get(timeout=600)
            assert line is not None, self.seen[-5:]
            self.seen.append(line)
            if line["type"] in kinds:
                return line

    def _send(self, line: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()

    def say(self, text: str) -> str:
        """Send a message of the user and wait for the reply's end; return the message's id."""
        name = str(uuid.uuid4())
        self._send({"type": "user", "message": {"role": "user", "content": text}, "uuid": name})
        self._until("result")
        return name

    def request(self, subtype: str, **more: Any) -> Any:
        """Send a request of a host and return its answer."""
        self._send(
            {"type": "control_request", "request_id": str(uuid.uuid4()), "request": {"subtype": subtype, **more}}
        )
        return self._until("control_response")["response"]

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=120)
        self.reader.join(timeout=120)


class Conversation:
    """The engine's replies in a conversation of Claude Code, and the kinds of its calls."""

    def __init__(self, director: Director, folder: Path) -> None:
        self.director = director
        director.answer = self.answer
        self.reads = tool_call("Read", file_path=str(folder / "apples.txt"))
        self.scripts: dict[str, list[str]] = {}
        """By the word of a message or of a task: the replies to it."""
        self.delegated: dict[str, list[str]] = {}
        """By the word of a message: the words of the tasks that its first reply gives to agents."""
        self.spawned: dict[str, list[int]] = {}
        """By the word of a task: the calls that gave it to an agent."""
        self.main: list[int] = []
        """The calls of the user's conversation that are in its history."""
        self.first: list[int] = []
        """The calls that got the first message."""
        self.begun: dict[str, int] = {}
        """By the word of a message: the first call that got it."""
        self.asides: set[str] = set()
        """Words of side questions."""
        self.edits: dict[str, list[int]] = {}
        """By the word of a message that replaces another: the call that got that one."""
        self.failing: set[tuple[str, int]] = set()
        """Word and round of replies in which the engine fails."""
        self.compacting: list[int] = []
        """Where the next call of the conversation comes from, if the history was summarized before it."""
        self.tasks: list[str] = []

    def message(self) -> tuple[str, str]:
        """Return the word and the text of a message of the user; its replies read a file or start agents."""
        rng, word = self.director.rng, self.director.word()
        tasks = [self._task() for _ in range(rng.choice((0, 1, 2, 3)))]
        if tasks and rng.random() < 0.2:
            # One task goes to two agents. If a call that both send failed, it would be unknown which one repeats it.
            tasks.append(tasks[0])
            self.failing.discard((tasks[0][0], 0))
        self.delegated[word] = [task for task, _ in tasks]
        calls = [tool_call(**AGENT, description=self.director.text()[:24], prompt=text) for _, text in tasks]
        rounds = ["\n".join([self.director.text(), *calls]) if calls else self.reads]
        self.scripts[word] = [*rounds, *[self.reads] * rng.randint(0, 1), self.director.text(2)]
        if rng.random() < 0.4:
            self.failing.add((word, rng.randint(0, 1)))
        return word, f"{self.director.text(2)} {word}"

    def _task(self) -> tuple[str, str]:
        rng, word = self.director.rng, self.director.word()
        # Sometimes a task repeats an earlier one and asks for more.
        before = self.tasks[-1] if self.tasks and rng.random() < 0.3 else self.director.text(rng.randint(1, 2))
        text = f"{before} {self.director.text()} {word}"
        self.tasks.append(text)
        self.scripts[word] = [*[self.reads] * rng.randint(0, 1), self.director.text(rng.randint(1, 3))]
        self.spawned[word] = []
        if rng.random() < 0.15:
            self.failing.add((word, 0))
        return word, text

    def answer(self, request: Request) -> Answer:
        """Answer a call of the harness, and return where it comes from."""
        number, reply, users = request.number, f"{self.director.text(2)} {self.director.word()}", request.users
        if "<summary>" in users[-1]:
            self.compacting = [*self.main[-2:], number]
            return Answer(f"<summary>{reply} {self.director.text(5)}</summary>", "side_call", self.main[-2:])
        if any(word in users[-1] for word in self.asides):
            return Answer(reply, "side_call", self.main[-1:])
        if '"name": "Read"' not in request.system:
            return Answer(reply, "side_call", self.first)
        word = max(
            (script for script in self.scripts if any(script in user for user in users)), key=request.prompt.rfind
        )
        at, script = request.since(word), self.scripts[word]
        fails = (word, at) in self.failing
        self.failing.discard((word, at))
        text = f"{script[min(at, len(script) - 1)]} {self.director.word()}"
        for task in () if at or fails else self.delegated.get(word, ()):
            self.spawned[task].append(number)
        if word in self.spawned:
            return Answer(text, None if at else "subagent", self.spawned[word], fails)
        edit = self.edits.get(word) if not at else None
        kind, parents = ("compaction", self.compacting) if self.compacting else ("edit" if edit else None, edit or [])
        self.compacting = []
        if not self.main:
            self.first.append(number)
        if not fails:
            self.begun.setdefault(word, number)
            self.main.append(number)
        return Answer(text, kind, parents, fails)


def scene(director: Director, url: str, home: Path, folder: Path, messages: int, *, hints: bool) -> None:
    """Talk with Claude Code: messages, and what a user and a host do between them."""
    rng, talk = director.rng, Conversation(director, folder)
    claude = Claude(url, home, folder, hints)
    title_first, first, compacted = rng.random() < 0.5, "", True
    for at in range(messages):
        word, text = talk.message()
        if at == 0:
            first = text
            if title_first:
                claude.request("generate_session_title", description=first, persist=False)
        name = claude.say(text)
        while not compacted and rng.random() < 0.4:
            # The user rewinds and sends something else.
            claude.request("rewind_conversation", target_message_uuid=name)
            begun = talk.begun[word]
            del talk.main[talk.main.index(begun) :]
            word, text = talk.message()
            talk.edits[word] = [begun]
            name = claude.say(text)
        compacted = rng.random() < 0.75 and at < messages - 1
        if compacted:
            claude.say("/compact")
        elif hints and rng.random() < 0.3:
            aside = director.word()
            talk.asides.add(aside)
            claude.request("side_question", question=f"{director.text()} {aside}")
    if not title_first:
        claude.request("generate_session_title", description=first, persist=False)
    claude.close()


def run(director: Director, cutting: Cutting, gateway: str, home: Path, folder: Path, seed: int) -> None:
    """Play one scene; every second seed with the headers that tell the class of each request."""
    scene(director, f"{gateway}/sessions/claude-{seed}", home, folder, 8, hints=seed % 2 == 1)
