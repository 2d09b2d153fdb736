"""Hatchling's side of the native build: compile before packing, and mark the wheel as belonging to
this platform.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface[Any]):
    """Runs native/build.py for wheels, editable or not. A source archive needs no library."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        subprocess.run([sys.executable, str(root / "native" / "build.py")], check=True)
        if any((root / "freetoken" / "_native").glob("libfreetoken.*")):
            build_data["pure_python"] = False
            # One library fits every Python version, so only the platform is named.
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"
