"""What every route shares: request ids, the table from error classes to statuses, and the edge
where errors become replies.

Knows no engine and no route.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

import msgspec
from aiohttp import web

from freetoken.errors import (
    CapacityError,
    DeviceError,
    NotReady,
    RequestError,
    UnknownModel,
)
from freetoken.log import REQUEST_ID as LOGGED_ID
from freetoken.server.sse import EventStream

_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID = web.RequestKey("request_id", str)
EVENT_STREAM = web.RequestKey("event_stream", EventStream)
"""Set by routes that stream: an error after the status line can only be an event."""

_encoder = msgspec.json.Encoder()
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """One error as the client sees it."""

    status: int
    kind: str
    """OpenAI's `type`."""
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None

    def body(self) -> bytes:
        """OpenAI's error object, also the payload of an error inside a stream."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return _encoder.encode({"error": error})

    def response(self) -> web.Response:
        """A whole JSON reply."""
        response = web.Response(status=self.status, body=self.body(), content_type=JSON)
        if self.retry_after_s is not None:
            response.headers["Retry-After"] = str(self.retry_after_s)
        return response


STATUSES: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (UnknownModel, 404, "invalid_request_error", "model_not_found"),
    (RequestError, 400, "invalid_request_error", None),
    (NotReady, 503, "server_error", "model_loading"),
    (CapacityError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (DeviceError, 500, "server_error", None),
)
"""Error class -> status, type and the code used when the error has none. First match wins."""

_HTTP_TEXTS = {
    404: "expected a route of this server, got {method} {path}; see GET / for the list",
    405: "expected another method, got {method} for {path}; allowed: {allow}",
    413: "expected a body of at most {limit} bytes, got more; shorten it or raise --max-body-bytes",
}


def json_response(
    value: object, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """Reply with `value` as JSON."""
    return web.Response(
        status=status, body=_encoder.encode(value), content_type=JSON, headers=headers
    )


def call_id(request: web.Request, prefix: str) -> str:
    """Return the id of a call's reply: the request's own number, so that logs, headers and replies
    can be matched.
    """
    return prefix + request[REQUEST_ID].removeprefix("req_")


def error_reply(error: BaseException, request_id: str) -> ErrorReply:
    """Return what the client is told about `error`. Errors that nobody raised on purpose stay
    private to the _log.
    """
    for cls, status, kind, code in STATUSES:
        if isinstance(error, cls):
            param = error.param if isinstance(error, RequestError) else None
            own_code = error.code if isinstance(error, RequestError) else None
            retry = error.retry_after_s if isinstance(error, CapacityError) else None
            return ErrorReply(status, kind, str(error), own_code or code, param, retry)
    text = f"internal error; the server's log has the cause under request id {request_id}"
    return ErrorReply(500, "server_error", text, "internal_error")


def first_cause(error: BaseException) -> BaseException:
    """The first error inside nested task groups: siblings were only cancelled because of it."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


@web.middleware
async def edge(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id, log it once, and turn every error into the protocol's own reply."""
    request_id = request[REQUEST_ID] = f"req_{secrets.token_hex(12)}"
    logged_id = LOGGED_ID.set(request_id)
    started = time.perf_counter()
    outcome = "left"
    try:
        response = await _answer(request, handler, request_id)
        outcome = str(response.status)
        return response
    finally:
        elapsed_ms = (time.perf_counter() - started) * 1000
        _log.info("%s %s %s %.1f ms", request.method, request.path, outcome, elapsed_ms)
        LOGGED_ID.reset(logged_id)


async def _answer(request: web.Request, handler: Handler, request_id: str) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _http_error(request, error)
    except Exception as error:  # noqa: BLE001 - the request edge: nothing may reach the client as a traceback
        return await _failure(request, first_cause(error), request_id)


async def _failure(
    request: web.Request, error: BaseException, request_id: str
) -> web.StreamResponse:
    stream = request.get(EVENT_STREAM)
    if isinstance(error, ConnectionResetError):
        # The client left while we wrote. The handler has cleaned up; nobody reads this reply.
        return stream.response if stream is not None else web.Response(status=499)
    reply = error_reply(error, request_id)
    if isinstance(error, RequestError | CapacityError):
        _log.debug("refused: %s", error)
    else:
        _log.error("failed", exc_info=error)
    if stream is None or not stream.is_open:
        return reply.response()
    try:
        async with asyncio.timeout(
            5
        ):  # a client that does not read must not hold the failed request
            await stream.fail(reply.body())
    except (TimeoutError, ConnectionResetError):
        _log.debug("left before the error could be sent")
    return stream.response


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    allow = error.headers.get("Allow", "")
    text = _HTTP_TEXTS.get(error.status, error.reason or "refused").format(
        method=request.method, path=request.path, allow=allow, limit=request.client_max_size
    )
    if error.status == 404 and (doubled := re.match(r"(/v1)+(/v1/.*)", request.path)):
        text += f"; the base URL already ends in /v1, so ask for {doubled[2]}"
    response = ErrorReply(error.status, "invalid_request_error", text).response()
    if allow:
        response.headers["Allow"] = allow
    return response


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Signal before any header is sent: the id is in every reply, streamed ones too."""
    request_id = request.get(REQUEST_ID)
    if request_id is not None:
        response.headers["x-request-id"] = request_id
