"""Read server-sent events, the format in which engines stream replies."""

from __future__ import annotations

from tokentape.errors import EngineContractError

MAX_EVENT_BYTES = 16 << 20
"""Size limit of an event. An event may contain all prompt ids: two million of them at 7 bytes each."""


class SseReader:
    """Reads server-sent events from chunks of bytes that may be cut anywhere.

    It follows the event-stream format of the WHATWG HTML standard: lines end with LF, CR or CRLF; `data` lines of one
    event are joined by LF; comments and the `event`, `id` and `retry` fields are skipped. It is stricter in one point:
    a line with any other field is an error, because it shows that the bytes are not an event stream.

        >>> reader = SseReader()
        >>> reader.feed(b'data: {"a"')
        []
        >>> reader.feed(b': 1}\\n\\ndata: [DONE]\\n\\n')
        [b'{"a": 1}', b'[DONE]']
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self._line = bytearray()
        self._data: list[bytes] = []
        self._size = 0
        self._after_cr = False

    @property
    def pending(self) -> bool:
        """Whether an event is incomplete. True at the end of a stream means that the stream was cut off."""
        return bool(self._line or self._data)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Read the next bytes, and return the data of the events that they complete.

        Raises `EngineContractError` for an event that is too large or not UTF-8, and for a line with an unknown field.
        """
        if not chunk:
            return []
        usual = chunk.startswith(b"data: {") and chunk.endswith(b"}\n\n") and b"\r" not in chunk
        if usual and chunk.find(b"\n") == len(chunk) - 2 and len(chunk) <= self._max and not self.pending:
            # The chunk is one event of one line. If it is not UTF-8, decoding its JSON fails later.
            self._after_cr = False
            return [chunk[6:-2]]
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")
        self._after_cr = chunk.endswith(b"\r")
        events: list[bytes] = []
        for line in chunk.splitlines(keepends=True):
            text = line.rstrip(b"\r\n")
            self._size += len(text)
            if self._size > self._max:
                raise EngineContractError(
                    f"the engine sent a server-sent event that exceeds the limit of {self._max} bytes"
                )
            self._line += text
            if len(text) < len(line):
                self._end_line(events)
        return events

    def _end_line(self, events: list[bytes]) -> None:
        line = bytes(self._line)
        self._line.clear()
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
            self._data.clear()
            self._size = 0
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            try:
                value.decode()
            except UnicodeDecodeError:
                raise EngineContractError("the engine sent a server-sent event that is not UTF-8") from None
            self._data.append(value.removeprefix(b" "))
        elif name not in (b"", b"event", b"id", b"retry"):
            raise EngineContractError(
                "the engine's reply is not a stream of server-sent events: a line has an unknown field; check that "
                "the URL is the engine's own"
            )
