"""GET /health, /v1/stats and /: how the server is. Reading only; no route here changes anything."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from freetoken.server.http import json_response
from freetoken.server.state import STATE

_ROUTES = ["/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/v1/stats"]


async def health(request: web.Request) -> web.Response:
    """200 when requests are taken; 503 with phase and bytes while loading; 500 with the cause when
    something broke.
    """
    state = request.app[STATE]
    progress = state.progress
    fault = state.text.engine.fault if state.text is not None else None
    if fault is not None or progress.phase == "error":
        cause = str(fault) if fault is not None else progress.error
        return json_response({"status": "error", "error": cause}, status=500)
    if state.text is not None:
        return json_response({"status": "ok", "model": state.text.engine.card.id})
    body: dict[str, Any] = {
        "status": "loading",
        "phase": progress.phase,
        "step": progress.step,
        "done_bytes": progress.done_bytes,
        "total_bytes": progress.total_bytes,
    }
    return json_response(body, status=503, headers={"Retry-After": "1"})


async def stats(request: web.Request) -> web.Response:
    """Return the engine's counters and state as they are now, and the loop's lateness."""
    state = request.app[STATE]
    figures = msgspec.to_builtins(state.ready().engine.statistics())
    return json_response(figures | {"loop_lag": state.loop_lag.figures()})


async def root(request: web.Request) -> web.Response:
    """Say what this is; clients probe `/` before they trust a base URL."""
    text = request.app[STATE].text
    model = None if text is None else text.engine.card.id
    return json_response({"name": "freetoken", "model": model, "routes": _ROUTES})
