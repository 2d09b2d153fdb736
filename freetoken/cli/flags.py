"""Command line flags, made from the table of settings. No flag of a setting is written down a
second time.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from freetoken.config import CONFIG_VARIABLE, KEYS, Config, Key, load_config


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add --config and one flag a setting. Values stay text; `load_config` checks them and words
    the errors.
    """
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help=f"TOML file of settings [{CONFIG_VARIABLE}]"
    )
    groups = {
        section: parser.add_argument_group(f"[{section}] settings")
        for section in dict.fromkeys(key.section for key in KEYS)
    }
    for key in KEYS:
        group = groups[key.section]
        if key.is_switch:
            group.add_argument(
                key.flag,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                dest=key.path,
                help=_help(key),
            )
        else:
            group.add_argument(
                key.flag,
                default=argparse.SUPPRESS,
                dest=key.path,
                metavar=_metavar(key),
                help=_help(key),
            )


def read_config(arguments: argparse.Namespace, environ: Mapping[str, str] | None = None) -> Config:
    """Return the settings that flags, environment and TOML give together. Raises ConfigError."""
    given = vars(arguments)
    flags = {key.path: given[key.path] for key in KEYS if key.path in given}
    return load_config(flags, environ, given.get("config"))


def _metavar(key: Key) -> str:
    if key.choices:
        return "{" + ",".join(key.choices) + "}"
    kind = key.expected.split()
    return {"an": "N", "a": "X"}.get(kind[0], "TEXT")


def _help(key: Key) -> str:
    default = "" if key.default in (None, "", False) else f"{key.default}; "
    # argparse formats help with %; descriptions are plain text.
    return f"{key.help} [{default}{key.variable}]".replace("%", "%%")
