"""Models, health, statistics and probes."""

from __future__ import annotations

import asyncio
import socket

import pytest

from freetoken.config import ServerConfig
from freetoken.errors import ConfigError
from freetoken.server.application import ServerState, build_application, start
from freetoken.server.sampling import defaults_from
from tests.server.serving import MODEL, chat, serving


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_models_show_the_usable_context(prefix: str) -> None:
    """H01: agents must see the context they can really use; ids hold slashes."""

    async def main() -> None:
        async with serving(context=640) as site:
            status, listed = await site.get(f"{prefix}/models")
            assert (status, listed["object"]) == (200, "list")
            [model] = listed["data"]
            assert model["id"] == MODEL
            assert model["object"] == "model"
            assert (model["context_length"], model["max_model_len"]) == (640, 640)
            assert await site.get(f"{prefix}/models/{MODEL}") == (200, model)
            assert (await site.get(f"{prefix}/models/tiny%2Fmodel"))[1] == model
            status, alias = await site.get(f"{prefix}/models/alias")
            assert (status, alias["id"]) == (200, "alias")
            for unknown in ("gpt-9", "default"):
                status, body = await site.get(f"{prefix}/models/{unknown}")
                assert (status, body["error"]["code"]) == (404, "model_not_found")

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/", "/health", "/v1/health", "/v1/models", "/v1/stats"])
def test_probes_answer_get_and_head(path: str) -> None:
    """Catches clients that give up since their probe fails."""

    async def main() -> None:
        async with serving() as site:
            for method in ("GET", "HEAD"):
                async with site.session.request(method, site.url + path) as response:
                    assert response.status == 200
                    assert response.content_type == "application/json"

    asyncio.run(main())


def test_statistics_count_steps_and_pages() -> None:
    """Catches statistics that are not the engine's own."""

    async def main() -> None:
        async with serving() as site:
            await site.post("/v1/chat/completions", chat())
            _, stats = await site.get("/v1/stats")
        assert stats["requests"] == stats["finished"] == 1
        assert stats["steps"] >= 6
        pages = stats["pages"]
        assert pages["free"] + pages["cached"] + pages["in_use"] == pages["capacity"] == 512

    asyncio.run(main())


def test_port_in_use_is_a_settings_error() -> None:
    """Catches a traceback, or a silent other port, when the port is taken."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            app = build_application(ServerState(), ServerConfig())
            with pytest.raises(ConfigError, match=f"--port: expected a free port.*{port}"):
                await start(app, "127.0.0.1", port)

    asyncio.run(main())


def test_given_socket_is_served() -> None:
    """Catches a restart that cannot take over its listening socket."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            app = build_application(ServerState(), ServerConfig())
            runner, port = await start(app, "127.0.0.1", 0, sock=sock)
            assert port == sock.getsockname()[1]
            await runner.cleanup()

    asyncio.run(main())


def test_defaults_from_generation_config_keeps_what_is_sane() -> None:
    """Catches nonsense in a checkpoint's file that would reach the sampler."""
    found = defaults_from(
        {
            "temperature": 0.6,
            "top_k": 20.0,
            "top_p": float("nan"),
            "min_p": -1,
            "repetition_penalty": True,
            "do_sample": True,
            "eos_token_id": [1, 2],
        }
    )
    assert found == {"temperature": 0.6, "top_k": 20}
    assert defaults_from({"top_k": 0}) == {"top_k": -1}
