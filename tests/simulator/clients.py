"""The clients of a gateway: agents, and those who judge, train, delete and take data out meanwhile."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass
from typing import Any

from tests.simulator.ledger import Contents, Ledger, Received, Removal, prompt_faults
from tests.simulator.world import messages_in, replies_in


@dataclass
class Client:
    """One client. Its calls are sent again until they are answered."""

    ledger: Ledger
    name: str

    def __post_init__(self) -> None:
        self.world, self.rng = self.ledger.world, self.ledger.world.rng

    async def run(self) -> None:
        raise NotImplementedError

    async def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Send a request once; return its status, 0 if nothing is known of it, and the body of the answer."""
        answer = await self.world.request(method, path, body)
        status, data = (0, b"") if answer is None else answer
        self.world.note(f"{self.name} {method} {path} {status}")
        if status == 500:
            self.ledger.faults.append(f"status 500: {data.decode()[:200]}")
        if not status:
            # Longer than anything of it is under way.
            await asyncio.sleep(5.0)
        return status, data

    def unexpected(self, status: int, what: str) -> None:
        self.ledger.faults.append(f"{what} was answered with status {status}")


class Agent(Client):
    """One conversation, with calls that are retried until they are answered or abandoned."""

    async def run(self) -> None:
        rng = self.rng
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"{self.name}?"}]
        known = [messages]
        for step in range(rng.randint(1, 14)):
            if rng.random() < 0.15:
                both = [self.call(f"{step}{side}", messages) for side in "ab"]
                replies = (await asyncio.gather(*both))[0]
            else:
                replies = await self.call(str(step), messages)
            if replies is None:
                if rng.random() < 0.5:
                    return
                messages = [*messages[:-1], {"role": "user", "content": f"Once more, {step}."}]
                continue
            # Each choice can be continued, now or later.
            known += [[*messages, reply, {"role": "user", "content": f"And {step}?"}] for reply in replies]
            messages = rng.choice(known) if rng.random() < 0.15 else known[-rng.randint(1, len(replies))]
            if rng.random() < 0.1:
                messages = [messages[0], {"role": "user", "content": f"Anew {step}."}]
            await asyncio.sleep(self.world.loop.delay())

    @property
    def base(self) -> str:
        return f"/sessions/{self.name}"

    async def call(self, step: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """Return the messages of the reply to one call, with up to five attempts."""
        rng, world, ledger = self.rng, self.world, self.ledger
        most, choices, first_sent = rng.choice([3, 64, 64]), rng.choice([1, 1, 1, 1, 2, 3]), world.loop.now
        body: dict[str, Any] = {"model": "m", "messages": messages, "return_token_ids": True, "max_tokens": most}
        body |= {"n": choices} if choices > 1 else {}
        body |= {"stream": True} if rng.random() < 0.5 else {}
        key = f"{self.name}-{step}" if rng.random() < 0.6 else None
        for attempt in range(5):
            headers = {"x-stainless-retry-count": str(attempt)} | ({} if key is None else {"idempotency-key": key})
            patience = rng.choice([0.001, 0.01, 0.05]) if rng.random() < world.faults.impatient else 30.0
            ledger.calls += 1
            answer = await world.request("POST", f"{self.base}/v1/chat/completions", body, headers, patience)
            world.note(f"{self.name} {step} {attempt} {None if answer is None else answer[0]}")
            status, data = answer or (0, b"")
            if status == 200 and (found := replies_in(data)):
                call, now = (self.name, step), world.loop.now
                received = [
                    Received(call, place["session_id"], place["turn"], prompt, ids, first_sent, now, first=not attempt)
                    for place, prompt, ids in found
                ]
                self._check(received, messages, most, choices)
                if key is not None and rng.random() < 0.1:
                    await self._reuse(key, body, received[0].session)
                return [self._message(message) for message in messages_in(data)]
            if status == 500 or (400 <= status < 500 and not self._is_gone(status, first_sent)):
                ledger.faults.append(f"status {status}: {data.decode()[:200]}")
            if 400 <= status < 500:
                return None
            await asyncio.sleep(rng.choice([0.0, 0.01, 0.5, 3.0]))
        return None

    def _is_gone(self, status: int, first_sent: float) -> bool:
        """Return whether a client removed the session in the meantime, or had dropped it before."""
        if any(
            removal.drops and removal.done >= 0 and removal.session == self.name for removal in self.ledger.removals
        ):
            return status in (404, 409)
        return status == 404 and self.ledger.removed(self.name, first_sent)

    def _check(self, received: list[Received], messages: list[dict[str, Any]], most: int, choices: int) -> None:
        """Record a reply and compare it with the request."""
        self.ledger.received += received
        if len(received) != choices:
            self.ledger.faults.append(f"{self.name}: {choices} choices were asked for, and {len(received)} came")
        for reply in received:
            wrong = list(
                prompt_faults(self.world, messages, reply.prompt, whole=not self.ledger.removed(reply.session))
            )
            if len(reply.ids) > most:
                wrong.append(f"{len(reply.ids)} tokens, and at most {most} were asked for")
            self.ledger.faults += [f"{reply.session} turn {reply.turn}: {what}" for what in wrong]

    def _message(self, reply: dict[str, str]) -> dict[str, Any]:
        """Return the message of a reply as the client sends it back: some harnesses omit reasoning."""
        sent = {"role": "assistant", "content": reply["content"]}
        if reply["reasoning_content"] and self.rng.random() < 0.5:
            sent["reasoning_content"] = reply["reasoning_content"]
        return sent

    async def _reuse(self, key: str, body: dict[str, Any], session: str) -> None:
        """Send another body with the key of a call that was answered."""
        other = {**body, "messages": [*body["messages"], {"role": "user", "content": "Else?"}]}
        answer = await self.world.request("POST", f"{self.base}/v1/chat/completions", other, {"idempotency-key": key})
        if answer is not None and answer[0] == 200 and not self.ledger.removed(session):
            self.ledger.faults.append(f"{self.name}: another body got the reply of key {key}")


class Stranger(Agent):
    """Asks the same question again and again, and names no session."""

    base = ""

    def _is_gone(self, status: int, first_sent: float) -> bool:
        return status in (404, 409) and any(removal.drops for removal in self.ledger.removals)

    async def run(self) -> None:
        for step in range(self.rng.randint(1, 4)):
            await self.call(str(step), [{"role": "user", "content": f"{self.name} asks."}])
            await asyncio.sleep(self.rng.choice([0.0, 0.5]))


class Judge(Client):
    """Gives rewards and values to what agents have received, one after the other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.number = 0.0

    async def run(self) -> None:
        for _ in range(self.rng.randint(4, 20)):
            await asyncio.sleep(self.rng.choice([0.01, 0.1, 0.5]))
            if self.ledger.received:
                await self.write_values(self.rng.choice(self.ledger.received))

    async def write_values(self, reply: Received) -> None:
        """Give something to a turn, its leaf or its session."""
        ledger, kind = self.ledger, self.rng.choice(["session", "leaf", "turn", "column"])
        self.number += 4096.0
        ledger.changes[reply.session] += 1
        seq = None if kind == "session" else reply.turn
        if kind == "column":
            body = {"turn": seq, "columns": {"a": [self.number + at for at in range(len(reply.ids))]}}
            possible = ledger.columns.setdefault((reply.session, reply.turn), {None})
            status, _ = await self.request("POST", f"/sessions/{reply.session}/columns", body)
        else:
            possible = ledger.rewards.setdefault((reply.session, kind, seq), {None})
            body = {"value": self.number} | ({} if seq is None else {kind: seq})
            status, _ = await self.request("POST", f"/sessions/{reply.session}/reward", body)
        ledger.changes[reply.session] += 1
        if status == 201:
            possible.clear()
        if status in (0, 201, 503):
            possible.add(self.number)
        elif 400 <= status < 500 and not ledger.removed(reply.session) and (kind != "leaf" or status != 404):
            self.unexpected(status, f"a {kind} of {reply.session} turn {reply.turn}")

    async def write_all_values(self, session: str) -> None:
        """Give values to all tokens of each leaf, when nothing else happens any more."""
        status, data = await self.request("GET", f"/sessions/{session}/trajectories")
        for trajectory in json.loads(data)["data"] if status == 200 else ():
            values = [trajectory["leaf"] * 4096.0 + at for at in range(len(trajectory["token_ids"]))]
            body = {"columns": {"b": values}, "leaf": trajectory["leaf"]}
            status, _ = await self.request("POST", f"/sessions/{session}/columns", body)
            if status != 201:
                self.unexpected(status, f"a column of {session} leaf {trajectory['leaf']}")


class Trainer(Client):
    """Pauses sampling, changes the weights once nothing is sampled, and lets it go on."""

    async def run(self) -> None:
        for version in range(1, self.rng.randint(2, 5)):
            await asyncio.sleep(self.rng.choice([0.01, 0.05, 0.5, 2.0]))
            wanted = {"mode": self.rng.choice(["wait", "abort"]), "timeout": self.rng.choice([0.0, 0.05, 5.0])}
            status, data = await self.request("POST", "/engine/pause", wanted)
            changed = status == 200 and json.loads(data)["idle"]
            if changed:
                self.world.weights = f"w{version}"
                await asyncio.sleep(self.world.loop.delay())
            body = {"weight_version": self.world.weights} if changed else {}
            status = 0
            while status != 200:
                status, _ = await self.request("POST", "/engine/resume", body)


class Operator(Client):
    """Deletes sessions."""

    async def run(self) -> None:
        for _ in range(self.rng.randint(1, 2)):
            await asyncio.sleep(self.rng.choice([0.01, 0.1, 0.5, 2.0]))
            session = self.rng.choice(["s0", "s1", "s2"])
            removal = Removal(session, self.world.loop.now)
            self.ledger.removals.append(removal)
            status, _ = await self.request("DELETE", f"/sessions/{session}")
            if status == 204:
                removal.done = self.world.loop.now
                self.world.reached["deleted"] += 1
            elif status in (404, 409, 507):
                removal.done = -math.inf


class Consumer(Client):
    """Takes snapshots, reads them out, and has their sessions dropped."""

    async def run(self) -> None:
        for _ in range(self.rng.randint(2, 6)):
            await asyncio.sleep(self.rng.choice([0.01, 0.1, 0.5, 3.0]))
            contents = await self.take()
            if contents is None:
                continue
            await asyncio.sleep(self.rng.choice([0.0, 0.1, 0.5, 3.0]))
            if self.rng.random() < 0.6:
                await self.confirm(contents, drop=self.rng.random() < 0.8)
            elif self.rng.random() < 0.3:
                await self.request("DELETE", f"/snapshots/{contents.snapshot_id}")
                contents.held = False

    async def take(self) -> Contents | None:
        """Take a snapshot of everything, or of changes since the last snapshot, and read it."""
        ledger = self.ledger
        since = ledger.snapshots[-1] if ledger.snapshots and self.rng.random() < 0.4 else None
        before, changes = list(ledger.received), dict(ledger.changes)
        expected = {(reply.session, reply.turn): ledger.reward_of(reply.session, reply.turn) for reply in before}
        status, data = await self.request("POST", "/snapshots", {} if since is None else {"since": since.snapshot_id})
        if status != 201:
            if status not in (0, 400, 503, 507):
                self.unexpected(status, "a snapshot")
            return None
        self.world.reached["snapshot"] += 1
        # Nothing may be given to a session meanwhile, else it is not known what belongs to it.
        ended = {session for session, count in ledger.changes.items() if count % 2 == 0}
        calm = {
            session
            for session in ended
            if ledger.changes[session] == changes.get(session) and not ledger.removed(session)
        }
        manifest = json.loads(data)
        body = await self.read(manifest["snapshot_id"])
        if body is None:
            return None
        sessions = tuple(session["session_id"] for session in manifest["sessions"])
        contents = Contents(manifest["snapshot_id"], body, sessions, since)
        if contents.digest != manifest["digest"]:
            ledger.faults.append(f"snapshot {contents.snapshot_id} has digest {contents.digest}")
        ledger.faults += ledger.missing_in(contents, before)
        for trajectory in contents.trajectories:
            session, leaf = trajectory.session_id, trajectory.leaf
            if session in calm and trajectory.reward not in expected.get((session, leaf), {trajectory.reward}):
                ledger.faults.append(
                    f"snapshot {contents.snapshot_id}: leaf {leaf} of {session} has {trajectory.reward}"
                )
        ledger.snapshots.append(contents)
        return contents

    async def read(self, snapshot_id: int) -> bytes | None:
        for _ in range(8):
            status, data = await self.request("GET", f"/snapshots/{snapshot_id}/trajectories")
            if status == 200:
                return data
            if 400 <= status < 500:
                self.unexpected(status, f"snapshot {snapshot_id}")
                return None
        return None

    async def confirm(self, contents: Contents, *, drop: bool) -> None:
        """Confirm a snapshot, and have its sessions dropped."""
        ledger, removals = self.ledger, []
        if drop:
            removals = [Removal(session, self.world.loop.now, drops=True) for session in contents.sessions]
            ledger.removals += removals
        contents.confirmed, contents.held = True, False
        body = {"digest": contents.digest, "drop_sessions": drop}
        status, data = await self.request("POST", f"/snapshots/{contents.snapshot_id}/confirm", body)
        if 400 <= status < 500:
            self.unexpected(status, f"the confirmation of snapshot {contents.snapshot_id}")
        if status != 200 or not drop:
            return
        contents.dropped = frozenset(json.loads(data)["dropped"])
        self.world.reached["dropped"] += len(contents.dropped)
        for removal in removals:
            removal.done = self.world.loop.now if removal.session in contents.dropped else -math.inf
        for session in sorted(contents.dropped):
            status, _ = await self.request("POST", "/sessions", {"session_id": session})
            if status == 201:
                ledger.faults.append(f"{session} was dropped, and its id was used again")

    async def read_again(self) -> None:
        """Read the snapshots still held: they must be unchanged."""
        for snapshot in self.ledger.snapshots:
            if snapshot.held and await self.read(snapshot.snapshot_id) != snapshot.body:
                self.ledger.faults.append(f"snapshot {snapshot.snapshot_id} is not what it was")
