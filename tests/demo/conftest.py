"""The real demo model, from the user's cache: run with `-m demo`, after `make smoke`."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetoken.checkpoint.demo import DemoPaths, fetch_demo
from freetoken.config import load_config


@pytest.fixture(scope="session")
def demo_paths() -> DemoPaths:
    """Where its files are; fetched if they are not there."""
    return fetch_demo(Path(load_config().model.cache_dir), lambda _step, _done, _total: None)
