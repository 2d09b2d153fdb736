"""`ft run`: serve a model and, as a client of that server, show its answer to a first chat."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Generator
from contextlib import aclosing, contextmanager

from freetoken import log
from freetoken.cli.flags import add_config_flags, read_config
from freetoken.cli.main import EXIT_FAULT
from freetoken.cli.progress import LoadingBar
from freetoken.config import Config
from freetoken.errors import FreeTokenError
from freetoken.server.client import stream_chat
from freetoken.types import Progress

QUESTION = "What is the capital of France?"
MAX_TOKENS = 128
"""A first answer is short; a small model that rambles is cut here. Half would cut honest answers.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the chat's flags and all settings."""
    parser.add_argument(
        "--prompt", default=QUESTION, metavar="TEXT", help=f"first chat [{QUESTION}]"
    )
    parser.add_argument(
        "--once", action="store_true", help="stop after the answer; exit 1 if there was none"
    )
    parser.add_argument(
        "--expect", metavar="TEXT", help="with --once: exit 0 only if the answer contains this"
    )
    add_config_flags(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Serve, chat once, then keep serving unless --once. Returns the exit code."""
    config = read_config(arguments)
    if not _names_model(config):
        setattr(arguments, "model.demo", True)
        config = read_config(arguments)
    log.configure(config.server.log_level)
    from freetoken import app  # torch: two seconds that wrong settings need not wait for

    progress = Progress()
    with LoadingBar(progress) as bar:

        async def after_ready(base_url: str) -> int | None:
            bar.close()
            with _quiet_requests():
                answer = await first_chat(base_url, arguments.prompt)
            if arguments.once:
                return verdict(answer, arguments.expect)
            print(f"Serving on {base_url}/v1 until Ctrl-C.", flush=True)
            return None

        return app.run(config, progress=progress, after_ready=after_ready)


async def first_chat(base_url: str, prompt: str) -> str:
    """Print question and answer as it streams in; return the answer, "" if the chat failed."""
    print(f"> {prompt}", flush=True)
    parts: list[str] = []
    try:
        async with aclosing(stream_chat(base_url, prompt, max_tokens=MAX_TOKENS)) as texts:
            async for text in texts:
                parts.append(text)
                print(text, end="", flush=True)
    except FreeTokenError as error:
        print(f"ft: error: {error}", file=sys.stderr)
        return ""
    print(flush=True)
    return "".join(parts)


def verdict(answer: str, expected: str | None) -> int:
    """Return the exit code of --once, saying on stderr what was wrong with the answer."""
    if answer.strip() and (expected is None or expected in answer):
        return 0
    wanted = "some text" if expected is None else repr(expected)
    print(f"ft: error: expected {wanted} in the answer, got {answer!r}", file=sys.stderr)
    return EXIT_FAULT


@contextmanager
def _quiet_requests() -> Generator[None]:
    """The server's line about our own request would land in the middle of the answer."""
    requests = logging.getLogger("freetoken.server.http")
    requests.setLevel(logging.WARNING)
    try:
        yield
    finally:
        requests.setLevel(logging.NOTSET)


def _names_model(config: Config) -> bool:
    model = config.model
    return model.demo or model.path is not None or model.fake is not None
