"""The native library at each instruction set this machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from freetoken.native import Cpu, Isa, Native, cpu_features, load, open_library


def usable_isas() -> list[Isa]:
    """Instruction sets this machine can run; none if the library was not built."""
    library = open_library()
    if library is None:
        return []
    cpu = cpu_features(library)
    avx2 = Cpu.AVX2 | Cpu.FMA
    out = [Isa.BASELINE]
    if avx2 in cpu:
        out.append(Isa.AVX2)
        if Cpu.AVX512 in cpu:
            out.append(Isa.AVX512)
    return out


@pytest.fixture(params=usable_isas(), ids=lambda isa: isa.name.lower())
def native(request: pytest.FixtureRequest) -> Iterator[Native]:
    """A pool of two threads at one instruction set."""
    loaded = load(threads=2, isa=request.param)
    assert loaded is not None
    with loaded:
        yield loaded


# Without a compiler there is no library to test, and the package is meant to work all the same.
collect_ignore_glob = [] if usable_isas() else ["test_*.py"]
