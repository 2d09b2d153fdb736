"""`ft serve`: serve a model over HTTP."""

from __future__ import annotations

import argparse

from freetoken import log
from freetoken.cli.flags import add_config_flags, read_config
from freetoken.cli.progress import LoadingBar
from freetoken.types import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all settings."""
    add_config_flags(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Serve until a signal. Returns the exit code."""
    config = read_config(arguments)
    log.configure(config.server.log_level)
    from freetoken import app  # torch: two seconds that wrong settings need not wait for

    progress = Progress()
    with LoadingBar(progress) as bar:

        async def after_ready(base_url: str) -> None:
            bar.close()

        return app.run(config, progress=progress, after_ready=after_ready)
