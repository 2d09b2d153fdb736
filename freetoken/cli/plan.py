"""`ft plan`: the memory plan of a model and what bounds its speed, from headers alone."""

from __future__ import annotations

import argparse
import sys

from freetoken import log
from freetoken.cli.flags import add_config_flags, read_config
from freetoken.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the described machine and all settings."""
    gigabytes = "GB of 10^9 bytes"
    parser.add_argument(
        "--vram", type=float, metavar="GB", help=f"plan for a GPU with so many {gigabytes} free"
    )
    parser.add_argument(
        "--ram", type=float, metavar="GB", help=f"plan for so many {gigabytes} of RAM free"
    )
    parser.add_argument(
        "--gbps",
        type=float,
        metavar="X",
        help="memory bandwidth in GB/s: adds the bound of decode speed",
    )
    parser.add_argument("--spec", action="store_true", help="print the model's spec, too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_config_flags(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Print the plan. Raises ConfigError if it does not fit, with what is short."""
    config = read_config(arguments)
    log.configure(config.server.log_level)
    for name in ("vram", "ram", "gbps"):
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name}: expected a number above 0, got {value}")
    if config.model.path is None and not config.model.demo:
        raise ConfigError("expected a model to plan for, got none; give --model PATH or --demo")
    from freetoken import planning  # torch: two seconds that wrong settings need not wait for

    report = planning.report(
        config,
        vram_bytes=_bytes(arguments.vram),
        ram_bytes=_bytes(arguments.ram),
        gb_per_s=arguments.gbps,
    )
    if arguments.json:
        sys.stdout.write(report.as_json() + "\n")
    else:
        print(report.as_text(with_spec=arguments.spec))
    return 0


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else int(gigabytes * 1e9)
