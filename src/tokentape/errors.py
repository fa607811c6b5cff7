"""Every error that Tokentape raises on purpose: one tree, the HTTP status on the class. See docs/reference/errors.md.

A message says what was found, what was expected and what to do. It never holds prompt text: messages reach
logs and other people's clients.
"""

from __future__ import annotations

from typing import Any


class TokentapeError(Exception):
    """Base of all errors raised here on purpose.

    `status` is the HTTP status the gateway answers with, `code` the machine-readable name in the body, and
    `retry` says whether sending the same request again can help (the gateway turns it into `x-should-retry`).
    `retry_after` are the seconds to wait before, if that is known.
    """

    status = 500
    code = "internal_error"
    retry = False
    retry_after: float | None = None


class InvalidRequest(TokentapeError, ValueError):
    """The request can't be understood or asks for something impossible; `param` names the culprit."""

    status = 400
    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class NothingToMeasure(InvalidRequest):
    """There is nothing to measure: an empty corpus, or a server that answers no question."""


class ContextTooLong(InvalidRequest):
    """The prompt leaves no room for a reply. Harnesses look for this code and then shorten the conversation."""

    code = "context_length_exceeded"


class UnsupportedParameter(InvalidRequest):
    """The parameter is known, but this gateway or its engine doesn't do it. Refused, never ignored."""

    code = "unsupported_parameter"


class IdempotencyMismatch(InvalidRequest):
    """An Idempotency-Key came again with another body."""

    code = "idempotency_mismatch"


class Unauthorized(TokentapeError):
    """No API key, or none that this gateway knows."""

    status = 401
    code = "unauthorized"


class Forbidden(TokentapeError):
    """The API key is known, but not for this."""

    status = 403
    code = "forbidden"


class NotFound(TokentapeError, LookupError):
    """There is nothing at that address, or it belongs to another key: the two look the same."""

    status = 404
    code = "not_found"


class Conflict(TokentapeError):
    """Another writer was first: this turn number is already recorded, or the session id is taken."""

    status = 409
    code = "conflict"


class CommitRace(Conflict):
    """Another gateway over the same record was first to answer this very call; sent again, it gets that reply."""

    code = "answered_elsewhere"
    retry = True


class TooLarge(TokentapeError):
    """The request is larger than this gateway takes."""

    status = 413
    code = "too_large"


class WrongContentType(TokentapeError):
    """The body is JSON, but its header says something else."""

    status = 415
    code = "wrong_content_type"


class HeadersTooLarge(TokentapeError):
    """The request's line and headers are larger than this gateway takes."""

    status = 431
    code = "headers_too_large"

    def __init__(
        self, message: str = "the request's line and headers are larger than the 64 KiB that this gateway takes"
    ) -> None:
        super().__init__(message)


class TemplateRefused(TokentapeError, ValueError):
    """The chat template does not take this conversation, or no bridge for it could be certified."""

    status = 422
    code = "template_refused"


class LimitReached(TokentapeError):
    """A limit of this gateway is reached; `retry_after` seconds later there may be room."""

    status = 429
    code = "limit_reached"
    retry = True

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.retry = retry_after is not None


class TokenizerUnusable(TokentapeError, ValueError):
    """The model folder has no tokenizer or chat template that can be loaded safely."""

    code = "tokenizer_unusable"


class TokenizationChanged(TokentapeError, ValueError):
    """A tokenizer or template does not do what its lockfile says; `report` says what changed, as fields."""

    code = "tokenization_changed"

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message, report)
        self.message = message
        self.report = report

    def __str__(self) -> str:
        return self.message


class InvariantViolation(TokentapeError):
    """Exactness or append-only would have been broken. Nothing was committed; this is a bug to report."""

    code = "invariant_violation"


class EngineError(TokentapeError):
    """The engine failed; nothing of this turn was committed."""

    status = 502
    code = "engine_error"
    retry = True


class EngineContractError(EngineError):
    """The engine's reply can't be trusted: ids missing, counts that differ, an id outside the vocabulary."""

    code = "engine_contract"
    retry = False


class EngineUnavailable(EngineError):
    """The engine can't be reached or says that it takes no requests now."""

    status = 503
    code = "engine_unavailable"


class EngineAborted(EngineUnavailable):
    """The engine ended a call before it was finished. `code` is why: `engine_abort`, or `paused` for new weights."""

    code = "engine_abort"

    def __init__(self, message: str, cause: str = code) -> None:
        super().__init__(message)
        self.code = cause
        self.retry_after = 1.0


class EngineTimeout(EngineError):
    """The engine did not answer, or stopped answering, in the time allowed."""

    status = 504
    code = "engine_timeout"


class StoreError(TokentapeError):
    """The record could not be written or read; the turn is not acknowledged."""

    status = 503
    code = "store_error"


class StoreLocked(StoreError):
    """Another process has this data directory open for writing."""

    code = "store_locked"


class StoreCorrupt(StoreError):
    """What was read does not match its hash chain, or is not a record at all."""

    status = 500
    code = "store_corrupt"


class StoreFull(StoreError):
    """There is no room left to write to."""

    status = 507
    code = "store_full"


class StoreUnavailable(StoreError):
    """The database server can't be reached or was lost on the way; what was being written may be there or not."""

    code = "store_unavailable"
    retry = True


class GatewayUnavailable(TokentapeError):
    """The client could not reach the gateway, or what answered there is none."""

    status = 503
    code = "gateway_unavailable"
    retry = True


class TrainingStopped(TokentapeError):
    """A limit of a stop rule was passed: what would be trained is not what the run is to be trained on."""

    code = "training_stopped"
