"""All errors that Tokentape raises on purpose, each with its HTTP status. See docs/reference/errors.md.

A message states what was found, what was expected and what to do. It never contains prompt text, because messages
appear in logs and in other users' clients.
"""

from __future__ import annotations

from typing import Any


class TokentapeError(Exception):
    """Base class of all errors that Tokentape raises on purpose.

    `status` is the HTTP status of the gateway's response, and `code` the machine-readable name in its body. `retry` is
    True if retrying the same request can help; the gateway sends it as `x-should-retry`. `retry_after` is the number of
    seconds to wait first, if known.
    """

    status = 500
    code = "internal_error"
    retry = False
    retry_after: float | None = None

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class InvalidRequest(TokentapeError, ValueError):
    """The request is malformed or asks for something impossible. `param` names the invalid parameter."""

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param


class NothingToMeasure(InvalidRequest):
    """There is nothing to measure: the corpus is empty, or the server answers none of the requests."""


class ContextTooLong(InvalidRequest):
    """The prompt leaves no space for a reply. Agent harnesses check for this code and shorten the conversation."""

    code = "context_length_exceeded"


class UnsupportedParameter(InvalidRequest):
    """The gateway or its engine does not support this parameter. It is refused, never ignored."""

    code = "unsupported_parameter"


class IdempotencyMismatch(InvalidRequest):
    """An Idempotency-Key was used again with a different body."""

    code = "idempotency_mismatch"


class Unauthorized(TokentapeError):
    """The request has no API key, or one that the gateway does not know."""

    status = 401
    code = "unauthorized"


class Forbidden(TokentapeError):
    """The API key does not allow this request."""

    status = 403
    code = "forbidden"


class NotFound(TokentapeError, LookupError):
    """Nothing exists under this name, or it belongs to a different API key. The response is the same in both cases."""

    status = 404
    code = "not_found"


class Conflict(TokentapeError):
    """A different writer was first: the turn number is already recorded, or the session id already exists."""

    status = 409
    code = "conflict"


class CommitRace(Conflict):
    """A different gateway with the same record answered this call first. A retry returns that reply."""

    code = "answered_elsewhere"
    retry = True


class TooLarge(TokentapeError):
    """The request is larger than this gateway accepts."""

    status = 413
    code = "too_large"


class WrongContentType(TokentapeError):
    """The Content-Type header names a type other than JSON, or the Content-Encoding header a compression."""

    status = 415
    code = "wrong_content_type"


class HeadersTooLarge(TokentapeError):
    """The request line and headers are larger than this gateway accepts."""

    status = 431
    code = "headers_too_large"


class TemplateRefused(TokentapeError, ValueError):
    """The chat template rejects this conversation, or no bridge for it could be certified."""

    status = 422
    code = "template_refused"


class LimitReached(TokentapeError):
    """A limit of this gateway is reached. A retry may succeed after `retry_after` seconds."""

    status = 429
    code = "limit_reached"
    retry = True

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.retry = retry_after is not None


class TokenizerUnusable(TokentapeError, ValueError):
    """The model folder has no tokenizer or no chat template that can be loaded safely."""

    code = "tokenizer_unusable"


class TokenizationChanged(TokentapeError, ValueError):
    """A tokenizer or template no longer matches its lockfile. `report` contains the changes as fields."""

    code = "tokenization_changed"

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message, report)
        self.message = message
        self.report = report


class InvariantViolation(TokentapeError):
    """A turn would have broken exactness or the append-only rule. Nothing was committed. Please report this bug."""

    code = "invariant_violation"


class EngineError(TokentapeError):
    """The engine failed. At most an aborted turn was recorded: the tokens that had arrived, in no trajectory."""

    status = 502
    code = "engine_error"
    retry = True


class EngineContractError(EngineError):
    """The engine's reply contradicts itself or the request.

    Ids are missing, counts differ, an id is outside the vocabulary, or a requested stop or JSON schema is ignored.
    """

    code = "engine_contract"
    retry = False


class EngineUnavailable(EngineError):
    """The engine can't be reached, or reports that it does not accept requests now.

    `paused` says that the engine is paused, for example for new weights, and refused the call before it sampled.
    """

    status = 503
    code = "engine_unavailable"
    paused = False


class EngineAborted(EngineUnavailable):
    """The engine aborted a call. `code` is `engine_abort`, or `paused` if sampling was paused for a weight update."""

    code = "engine_abort"

    def __init__(self, message: str, cause: str = code) -> None:
        super().__init__(message)
        self.code = cause
        self.retry_after = 1.0


class EngineTimeout(EngineError):
    """The engine did not answer in time, or stopped answering."""

    status = 504
    code = "engine_timeout"


class StoreError(TokentapeError):
    """The record could not be written or read. The turn is not acknowledged."""

    status = 503
    code = "store_error"


class StoreLocked(StoreError):
    """A different process has this data directory open for writing."""

    code = "store_locked"


class StoreCorrupt(StoreError):
    """The data does not match its hash chain, or is not a record."""

    status = 500
    code = "store_corrupt"


class StoreFull(StoreError):
    """There is no disk space left for the record."""

    status = 507
    code = "store_full"


class StoreUnavailable(StoreError):
    """The database server can't be reached, or the connection was lost. A write in progress may have succeeded."""

    code = "store_unavailable"
    retry = True


class GatewayUnavailable(TokentapeError):
    """The client could not reach the gateway, or the server at this URL is not a gateway."""

    status = 503
    code = "gateway_unavailable"
    retry = True


class TrainingStopped(TokentapeError):
    """A limit of a stop rule was exceeded, so the run should not train on these samples."""

    code = "training_stopped"
