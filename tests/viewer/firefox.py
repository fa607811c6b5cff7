"""Start Firefox for Playwright, which speaks WebDriver BiDi to it.

    python -m tests.viewer.firefox FIREFOX ARGUMENTS...

Playwright expects a newer Firefox than a distribution has. This passes all messages on, and answers the commands that
Firefox does not know. It sets the color scheme as a preference of the whole browser over Marionette, so it begins the
session there. Commands of `NOT_TRIED` have no effect. The time zone comes from the environment.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType, web

PREFERENCES: dict[str, str | float | bool] = {
    "marionette.port": 0,
    # No question to the user before a page reads the clipboard.
    "dom.events.testing.asyncClipboard": True,
}

NOT_TRIED = {
    "network.addDataCollector": {"collector": "none"},
    "browser.setDownloadBehavior": {},
    "emulation.setScreenOrientationOverride": {},
    "emulation.setScreenSettingsOverride": {},
    "permissions.setPermission": {},
}
"""Commands that Firefox 140 does not support, or not for the clipboard, and the answers to send."""

COLOR_SCHEME = "layout.css.prefers-color-scheme.content-override"
SCHEMES = {"dark": 0, "light": 1}

ALLOW_EVAL = """
  const name = "content-security-policy";
  const observe = (channel) => {
    channel.QueryInterface(Ci.nsIHttpChannel);
    try {
      const policy = channel.getResponseHeader(name);
      channel.setResponseHeader(name, policy.replace("script-src 'self'", "script-src 'self' 'unsafe-eval'"), false);
    } catch (error) {
      // It has none.
    }
  };
  for (const when of ["response", "cached-response", "merged-response"]) {
    Services.obs.addObserver({ observe }, `http-on-examine-${when}`);
  }
"""
"""Playwright evaluates with the page's `eval`, which the viewer's policy forbids; the rest of the policy stays."""


class Marionette:
    """Firefox's protocol for tests, which can set preferences."""

    def __init__(self, profile: Path) -> None:
        self._profile = profile
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._last = 0

    async def begin(self, capabilities: dict[str, Any]) -> dict[str, Any]:
        """Begin the only session that Firefox supports, of both protocols. Return its id and capabilities."""
        port = int((self._profile / "MarionetteActivePort").read_text())
        self._streams = await asyncio.open_connection("127.0.0.1", port)
        await self._received()
        session: dict[str, Any] = await self._call("WebDriver:NewSession", {**capabilities, "webSocketUrl": True})
        await self._call("Marionette:SetContext", {"value": "chrome"})
        await self._run(ALLOW_EVAL)
        return session

    async def set_color_scheme(self, scheme: str | None) -> None:
        """Set the color scheme of all pages; None is the system's."""
        await self._run(f"Services.prefs.setIntPref({COLOR_SCHEME!r}, {SCHEMES.get(scheme or '', 2)})")

    async def quit(self) -> None:
        """End Firefox."""
        await self._call("Marionette:Quit", {"flags": ["eForceQuit"]})

    async def _run(self, script: str) -> None:
        await self._call("WebDriver:ExecuteScript", {"script": script, "args": []})

    async def _call(self, name: str, parameters: dict[str, Any]) -> Any:
        assert self._streams is not None
        self._last += 1
        message = json.dumps([0, self._last, name, parameters]).encode()
        self._streams[1].write(b"%d:%s" % (len(message), message))
        _, _, error, result = await self._received()
        if error is not None:
            raise RuntimeError(f"{name}: {error['message']}")
        return result

    async def _received(self) -> Any:
        assert self._streams is not None
        length = await self._streams[0].readuntil(b":")
        return json.loads(await self._streams[0].readexactly(int(length[:-1])))


class Relay:
    """Passes messages between Playwright and Firefox."""

    def __init__(self, marionette: Marionette) -> None:
        self._marionette = marionette
        self._sent: dict[int, dict[str, Any]] = {}

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        """Relay one connection until either side closes it."""
        playwright = web.WebSocketResponse(max_msg_size=0)
        await playwright.prepare(request)
        new = await playwright.receive_json()
        assert new["method"] == "session.new", new
        session = await self._marionette.begin(new["params"]["capabilities"]["alwaysMatch"])
        url = session["capabilities"]["webSocketUrl"]
        async with ClientSession() as http, http.ws_connect(url, max_msg_size=0) as firefox:
            await playwright.send_json({"type": "success", "id": new["id"], "result": session})
            back = asyncio.create_task(self._answers(firefox, playwright))
            async for message in playwright:
                if message.type is WSMsgType.TEXT:
                    command = json.loads(message.data)
                    self._sent[command["id"]] = command
                    await firefox.send_str(message.data)
            back.cancel()
        return playwright

    async def _answers(self, firefox: ClientWebSocketResponse, playwright: web.WebSocketResponse) -> None:
        async for message in firefox:
            if message.type is not WSMsgType.TEXT:
                continue
            answer = json.loads(message.data)
            command = self._sent.pop(answer.get("id"), None)
            if command and answer["type"] == "error" and (result := await self._instead(command)) is not None:
                await playwright.send_json({"type": "success", "id": command["id"], "result": result})
            else:
                await playwright.send_str(message.data)
        await playwright.close()

    async def _instead(self, command: dict[str, Any]) -> dict[str, Any] | None:
        """Return the result of a command that Firefox refused, None if the refusal stands."""
        if command["method"] == "emulation.setMediaFeaturesOverride":
            await self._marionette.set_color_scheme(command["params"]["features"].get("prefers-color-scheme"))
            return {}
        if command["method"] == "browser.close":
            await self._marionette.quit()
            return {}
        return NOT_TRIED.get(command["method"])


async def main(program: str, *arguments: str) -> int:
    """Run Firefox, and print the address of BiDi as Firefox does."""
    profile = Path(arguments[arguments.index("--profile") + 1])
    process = await asyncio.create_subprocess_exec(
        program, *arguments, "--marionette", "--remote-allow-system-access", stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    async for line in process.stderr:
        if b"WebDriver BiDi listening on" in line:
            break
        sys.stderr.buffer.write(line)
    else:
        return await process.wait()
    app = web.Application()
    app.router.add_get("/session", Relay(Marionette(profile)).serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(f"WebDriver BiDi listening on ws://127.0.0.1:{runner.addresses[0][1]}", file=sys.stderr, flush=True)
    async for line in process.stderr:
        sys.stderr.buffer.write(line)
    return await process.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
