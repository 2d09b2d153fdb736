"""Every error the project raises on purpose. The class says who must act; `server/http.py` turns
classes into statuses.

FreeTokenError
  ConfigError          a setting is wrong            exit 2 at start
  WeightError          the checkpoint does not fit   exit 2 at start
  CapacityError        no room now: queue, drain     429 or 503, Retry-After
    NotReady           still loading or closing      503
  RequestError         the client's input            400, field named
    ContextTooLong     prompt (+ reply) over context 400, context_length_exceeded
    UnknownModel       no such model here            404
  DeviceError          device or runner failed       fatal: loop ends, process exits 1
"""

from __future__ import annotations


class FreeTokenError(Exception):
    """Base of all: `except FreeTokenError` catches what we raise on purpose and nothing else."""


class ConfigError(FreeTokenError):
    """A setting is wrong. Text: expected, got, where, what to do."""


class WeightError(FreeTokenError):
    """A checkpoint is missing something, holds something unknown, or is damaged. Text names file
    and tensor.
    """


class CapacityError(FreeTokenError):
    """There is no room at this moment; the same request may succeed later."""

    def __init__(self, text: str, retry_after_s: int = 1) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class NotReady(CapacityError):
    """The model is still loading, or the server is closing."""


class RequestError(FreeTokenError):
    """The client's input is wrong. `param` is the path of the field (`messages[2].role`), `code` a
    stable word.
    """

    def __init__(self, text: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(text)
        self.param = param
        self.code = code


class ContextTooLong(RequestError):
    """The prompt leaves no room for a reply."""

    def __init__(self, prompt_tokens: int, limit: int, *, param: str | None = "messages") -> None:
        super().__init__(
            f"this model's maximum context length is {limit} tokens, but the prompt has"
            f" {prompt_tokens} tokens and at least 1 is needed for the reply; shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class UnknownModel(RequestError):
    """The named model is not served here."""

    def __init__(self, name: str, served: str) -> None:
        super().__init__(
            f"the model {name!r} is not served here; use {served!r}",
            param="model",
            code="model_not_found",
        )
        self.name = name


class DeviceError(FreeTokenError):
    """The device, its driver or the runner failed; nothing after it can be trusted."""
