"""The aiohttp application and how it is put on a socket. `app.py` builds it once; tests use the
same two functions.
"""

from __future__ import annotations

import errno
import socket

from aiohttp import web

from freetoken.config import ServerConfig
from freetoken.errors import ConfigError
from freetoken.server.control import health, root, stats
from freetoken.server.http import add_request_id, edge
from freetoken.server.models import get_model, list_models
from freetoken.server.openai_chat import chat_completions
from freetoken.server.openai_completions import completions
from freetoken.server.state import SERVER_CONFIG, STATE, ServerState

__all__ = ["ServerState", "build_application", "start"]

_CLOSE_S = 2.0
"""Seconds that handlers get to send their last bytes when the runner closes; the engine has been
drained before.
"""


def build_application(state: ServerState, config: ServerConfig) -> web.Application:
    """Return the application with all routes, each also without /v1: a base URL lacking it is the
    commonest mistake.
    """
    app = web.Application(middlewares=[edge], client_max_size=config.max_body_bytes)
    app[STATE] = state
    app[SERVER_CONFIG] = config
    app.on_response_prepare.append(add_request_id)
    app.router.add_get("/", root)
    for prefix in ("", "/v1"):
        app.router.add_get(f"{prefix}/health", health)
        app.router.add_get(f"{prefix}/stats", stats)
        app.router.add_get(f"{prefix}/models", list_models)
        app.router.add_get(f"{prefix}/models/{{id:.+}}", get_model)
        app.router.add_post(f"{prefix}/chat/completions", chat_completions)
        app.router.add_post(f"{prefix}/completions", completions)
    return app


async def start(
    app: web.Application, host: str, port: int, *, sock: socket.socket | None = None
) -> tuple[web.AppRunner, int]:
    """Listen and serve until the returned runner's `cleanup`. Returns the runner and the port.

    sock: a listening socket to use instead of host and port. Raises ConfigError if none can be
    bound.
    """
    # Without handler_cancellation a client that leaves would be computed for to the end.
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=_CLOSE_S
    )
    await runner.setup()
    site = web.TCPSite(runner, host, port) if sock is None else web.SockSite(runner, sock)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise _unbindable(host, port, error) from error
    address = runner.addresses[0]
    return runner, int(address[1])


def _unbindable(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"--port: expected a free port on {host}, got {port}, which another program uses;"
            " stop that program or choose another port (0 takes any free one)"
        )
    return ConfigError(
        f"--host and --port: expected an address to listen on, got {host}:{port} ({error.strerror})"
    )
