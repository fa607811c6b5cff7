"""opencode's server: titles of new sessions, tasks, summaries, reverted messages, and engines that fail."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import httpx2

from tests.harness.lineage.director import Answer, Cutting, Director, Request, tool_call
from tests.harness.scripted_agents import AGENTS, OFFLINE, program_of


class Talk:
    """One session of opencode."""

    def __init__(self, director: Director, folder: Path) -> None:
        self.director = director
        self.reads = tool_call("read", filePath=str(folder / "apples.txt"))
        self.scripts: dict[str, list[str]] = {}
        self.delegated: dict[str, str] = {}
        self.spawned: dict[str, list[int]] = {}
        self.failing: set[tuple[str, int]] = set()
        self.main: list[int] = []
        self.first: list[int] = []
        self.begun: dict[str, int] = {}
        self.edits: dict[str, list[int]] = {}
        self.compacting: list[int] = []
        self.empty = 0
        """Empty replies in the history: opencode puts one before the whole reply if an engine failed."""

    def message(self) -> tuple[str, str]:
        """Return the word and the text of a message; its replies may start a subagent."""
        rng, word = self.director.rng, self.director.word()
        script = [self.reads] if rng.random() < 0.5 else []
        if rng.random() < 0.6:
            task = self.director.word()
            text = f"{self.director.text(rng.randint(1, 2))} {task}"
            self.delegated[word], self.spawned[task] = task, []
            self.scripts[task] = [*[self.reads] * rng.randint(0, 1), self.director.text(2)]
            start = tool_call("task", description="Look", prompt=text, subagent_type="general")
            script = [f"{self.director.text()}\n{start}", *script]
        self.scripts[word] = [*script, self.director.text(2)]
        if rng.random() < 0.3:
            self.failing.add((word, rng.randint(0, len(script))))
        return word, f"{self.director.text(2)} {word}"

    def answer(self, request: Request) -> Answer | None:
        """Answer a call of this session, and None if it is of another one."""
        number, prompt, users = request.number, request.prompt, request.users
        word = max((script for script in self.scripts if script in prompt), key=prompt.rfind, default=None)
        if word is None:
            return None
        reply = f"{self.director.text(2)} {self.director.word()}"
        if '"name": "read"' not in request.system:
            if "title" in request.system:
                return Answer(reply, "side_call", self.first)
            self.compacting = [*self.main[-2:], number]
            return Answer(f"{reply} {self.director.text(5)}", "side_call", self.main[-2:])
        if not any(word in user for user in users):
            # After a summary opencode may ask the model to go on.
            word = next(reversed(self.begun), word)
        held = any(word in text for role, text in request.messages if role == "user")
        at = request.since(word) if held else len(self.scripts[word])
        fails = (word, at) in self.failing
        self.failing.discard((word, at))
        script = self.scripts[word]
        text = f"{script[min(at, len(script) - 1)]} {self.director.word()}"
        if not at and not fails and word in self.delegated:
            self.spawned[self.delegated[word]].append(number)
        if word in self.spawned:
            return Answer(text, None if at else "subagent", self.spawned[word], fails)
        edit = self.edits.get(word) if not at else None
        empty = request.messages.count(("assistant", ""))
        if empty > self.empty and self.main:
            edit = edit or self.main[-1:]
        self.empty = empty
        kind, parents = ("compaction", self.compacting) if self.compacting else ("edit" if edit else None, edit or [])
        self.compacting = []
        self.first += [number] if not self.main else []
        if not fails:
            self.begun.setdefault(word, number)
            self.main.append(number)
        return Answer(text, kind, parents, fails)


def run(director: Director, cutting: Cutting, gateway: str, home: Path, folder: Path, seed: int) -> None:
    """Hold ten sessions in one server, all in one session of the gateway; two begin with the same message."""
    base = f"{gateway}/sessions/opencode-{seed}/v1"
    program = program_of("opencode", "opencode-ai")
    assert program is not None
    (home / "opencode.json").write_text(AGENTS["opencode"].files["opencode.json"].replace("{base}", base))
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TMPDIR": str(home),
        "OPENCODE_CONFIG": str(home / "opencode.json"),
        "NO_PROXY": "127.0.0.1,localhost",
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9"),
        **OFFLINE,
    }
    talks: list[Talk] = []
    director.answer = lambda request: next(
        filter(None, (talk.answer(request) for talk in reversed(talks))), Answer("?")
    )
    with (
        (home / "errors").open("w") as errors,
        subprocess.Popen(
            [program, "serve", "--hostname", "127.0.0.1"],
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as server,
    ):
        try:
            assert server.stdout is not None
            address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
            with httpx2.Client(base_url=address, timeout=600, trust_env=False) as client:
                for _ in range(10):
                    talks.append(Talk(director, folder))
                    _hold(talks[-1], client)
        finally:
            server.terminate()
            server.wait(timeout=60)


def _hold(talk: Talk, client: httpx2.Client) -> None:
    rng = talk.director.rng
    session = _post(client, "/session", {})["id"]
    model = {"providerID": "tokentape", "modelID": "m"}

    def say(text: str) -> None:
        _post(client, f"/session/{session}/message", {"model": model, "parts": [{"type": "text", "text": text}]})

    count = rng.randint(3, 5)
    for at in range(count):
        word, text = talk.message()
        say(text)
        if at and rng.random() < 0.4:
            found = client.get(f"/session/{session}/message").json()
            name = [message["info"]["id"] for message in found if message["info"]["role"] == "user"][-1]
            _post(client, f"/session/{session}/revert", {"messageID": name})
            begun, calls = talk.begun[word], talk.director.calls
            at_message = talk.main.index(begun)
            # The replaced message's first call, or the one that opencode restarted with an empty reply.
            gone = talk.main[at_message:]
            replaced = [call for call in gone if call == begun or calls[call].answer.kind == "edit"]
            del talk.main[at_message:]
            word, text = talk.message()
            talk.edits[word] = replaced
            say(text)
        if at == count - 2:
            _post(client, f"/session/{session}/summarize", model)


def _post(client: httpx2.Client, path: str, body: dict[str, Any]) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code < 300, reply.text
    return json.loads(reply.text or "null")
