"""FreeToken: local inference of Mixture-of-Experts models in one process and one event loop.

`async with freetoken.Engine.open(path) as engine` embeds it in any asyncio program; `ft serve`
serves it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freetoken.embed import Engine

__version__ = "0.1.0"
__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> object:
    # Importing the package must not import torch: `ft --help` answers in a tenth of a second.
    if name == "Engine":
        return importlib.import_module("freetoken.embed").Engine
    raise AttributeError(f"module 'freetoken' has no attribute {name!r}")
