"""One tiny model a family, built once a session."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from freetoken.models.decoder import Decoder
from tests.models.oracle import CASES, Oracle, build
from tests.models.paged import opened


@pytest.fixture(scope="session")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Oracle]:
    """Build an oracle when it is first asked for."""
    built: dict[str, Oracle] = {}

    def get(name: str) -> Oracle:
        if name not in built:
            built[name] = build(name, tmp_path_factory.mktemp(name))
        return built[name]

    return get


@pytest.fixture(scope="session", params=list(CASES))
def oracle(request: pytest.FixtureRequest, oracles: Callable[[str], Oracle]) -> Oracle:
    """Each family's oracle in turn."""
    torch.set_num_threads(1)
    return oracles(request.param)


@pytest.fixture(scope="session")
def decoder(oracle: Oracle) -> Decoder:
    """Our decoder of the same checkpoint, fp32."""
    return opened(oracle.folder)
