"""Serve the application on a socket, in the foreground (`tokentape serve`) or in a thread (trainers and the demo)."""

from __future__ import annotations

import errno
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokentape.errors import InvalidRequest, TokentapeError
from tokentape.gateway._deadlines import BODY_SECONDS, HEADER_SECONDS, DeadlineConfig
from tokentape.gateway._limits import Drain

_GRACE_SECONDS = 10
_KEEP_ALIVE_SECONDS = 75
"""Seconds after which an idle connection is closed. Clients and load balancers must close it first (httpx after 5 s,
nginx after 60), or a request that they send at that moment is lost."""


def serve(
    app: ASGIApp,
    *,
    host: str = "127.0.0.1",
    port: int = 8800,
    has_keys: bool = False,
    on_ready: Callable[[str], None] | None = None,
    drain: Drain | None = None,
    header_seconds: float = HEADER_SECONDS,
    body_seconds: float = BODY_SECONDS,
    listener: socket.socket | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP, then finish the requests in flight, shut the application down and return.

    `port` 0 selects a free port. `on_ready` is called with the base URL when the gateway accepts requests. `drain` is
    the `Drain` passed to `create_app`, which limits how long calls may continue after the signal. A second SIGINT ends
    the drain. A connection is closed if the headers or body of a request take longer than `header_seconds` or
    `body_seconds` to arrive. `listener`, a bound socket, replaces `host` and `port`.

    Raises `InvalidRequest` for a host that other machines can reach, unless the application `has_keys`, because every
    client of a gateway without keys can read and delete every session, and for a port that is in use.
    """
    with listener or bind(host, port, has_keys) as listener:
        ready = None if on_ready is None else lambda: on_ready(url_of(listener))
        server = _Server(app, header_seconds, body_seconds, ready, drain)
        server.run(sockets=[listener])
    server.refuse_unstarted()


@contextmanager
def running(app: ASGIApp, *, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve in a background thread during the `with` block, and yield the base URL.

    >>> with running(create_app(turns, model_id="tiny")) as base_url:     # doctest: +SKIP
    ...     OpenAI(base_url=f"{base_url}/v1", api_key="none").models.list()
    """
    with bind(host, port, has_keys=False) as listener:
        answered = threading.Event()
        server = _Server(app, HEADER_SECONDS, BODY_SECONDS, answered.set)

        def run() -> None:
            try:
                server.run(sockets=[listener])
            finally:
                answered.set()

        thread = threading.Thread(target=run, name="tokentape-gateway", daemon=True)
        thread.start()
        try:
            # The first start with a model makes its certificate, which can take minutes on a busy machine.
            answered.wait()
            server.refuse_unstarted()
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join()


class _Server(uvicorn.Server):
    """A uvicorn server that reports when it is ready, drains at shutdown, and returns after a signal."""

    def __init__(
        self,
        app: ASGIApp,
        header_seconds: float,
        body_seconds: float,
        on_ready: Callable[[], None] | None,
        drain: Drain | None = None,
    ) -> None:
        config = DeadlineConfig(
            self._starting,
            header_seconds=header_seconds,
            body_seconds=body_seconds,
            ws="none",
            lifespan="on",
            interface="asgi3",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            log_config=None,
            log_level="warning",
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        super().__init__(config)
        self._app = app
        self._failure = TokentapeError("the gateway could not start; see its log")
        self._on_ready = on_ready
        self._drain = drain

    async def _starting(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application. If its startup fails, keep the error for `refuse_unstarted` instead of logging it."""
        if scope["type"] != "lifespan":
            return await self._app(scope, receive, send)

        async def send_on(message: Message) -> None:
            if message["type"] != "lifespan.startup.failed":
                await send(message)

        try:
            await self._app(scope, receive, send_on)
        except TokentapeError as error:
            if self.started:
                raise
            self._failure = error
            await send({"type": "lifespan.startup.failed"})

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # `_starting` is needed only for the lifespan; later connections call the application directly.
        self.config.loaded_app = self._app
        if self.started and self._on_ready is not None:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._drain is not None:
            self._drain.begin()
            await self._drain.finish(force=lambda: self.force_exit)
        await super().shutdown(sockets)
        if self.force_exit:
            # uvicorn skips this, and the application would be shut down by a cancellation.
            await self.lifespan.shutdown()

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn exits if the application's startup fails; see `refuse_unstarted`.
        with suppress(SystemExit):
            super().run(sockets)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        # uvicorn's own method raises the signal again at the end, which kills the process before callers can clean up.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in end_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def refuse_unstarted(self) -> None:
        if not self.started:
            raise self._failure


def end_signals() -> list[signal.Signals]:
    """Return the signals that end the gateway. SIGHUP is one of them unless it is ignored, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


def _address(host: str, has_keys: bool) -> tuple[socket.AddressFamily, str]:
    """Return the IP address to bind, and its family. Raises `InvalidRequest` for a host that `serve` refuses."""
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise InvalidRequest(f"host {host!r} is not an IP address; use 127.0.0.1", "host") from None
    if not address.is_loopback and not has_keys:
        raise InvalidRequest(
            f"host {host!r} is reachable from other machines, and this gateway has no API keys: every client could "
            "read and delete every session. Set API keys, or use 127.0.0.1.",
            "host",
        )
    return socket.AF_INET6 if address.version == 6 else socket.AF_INET, str(address)


def bind(host: str, port: int, has_keys: bool, *, shared: bool = False) -> socket.socket:
    """Return a bound socket. With `shared`, other sockets can use its port. Raises the errors of `serve`."""
    family, address = _address(host, has_keys)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((address, port))
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            advice = "stop it, or choose a different --port (0 chooses a free one)"
            raise InvalidRequest(
                f"port {port} of {host} is taken, perhaps by another gateway; {advice}", "port"
            ) from None
        problem = f"port {port} of {host} can't be opened ({error.strerror}); choose a different --host or --port"
        raise InvalidRequest(problem, "host") from None
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
