"""`ft COMMAND`: finds the command, runs it, and turns errors into one line on stderr and an exit
code.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol, cast

from freetoken import __version__
from freetoken.errors import ConfigError, FreeTokenError, WeightError

EXIT_FAULT = 1
"""The device, the server or the answer failed."""
EXIT_SETTINGS = 2
"""A setting or a checkpoint is wrong; argparse uses the same number for unknown flags."""
EXIT_INTERRUPTED = 130
"""Ctrl-C before the server could handle it; the shell's own convention, 128 + SIGINT."""

COMMANDS = {
    "serve": "serve a model over HTTP until Ctrl-C",
    "plan": "print the memory plan of a model and the speed to expect, without loading it",
    "run": "serve a model, print its streamed answer to a first chat, then keep serving",
}
"""Name -> one line of help. Each is the module `freetoken.cli.<name>`, imported only when it is
called.
"""


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, as settings do; argparse puts its whole usage before it."""

    def error(self, message: str) -> NoReturn:
        """Exit with the code of wrong settings."""
        text = f"{message[:1].lower()}{message[1:]}; `{self.prog} --help` lists what there is"
        if (flag := _unknown_flag(message)) is not None:
            known = [word for action in self._actions for word in action.option_strings]
            close = difflib.get_close_matches(flag, known, n=1)
            text += f"; did you mean {close[0]}?" if close else ""
        self.exit(EXIT_SETTINGS, f"ft: error: {text}\n")


def _unknown_flag(message: str) -> str | None:
    found = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
    return found[1] if found else None


class Command(Protocol):
    """What a command's module has."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    execute: Callable[[argparse.Namespace], int]
    """Returns the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `ft` with these arguments (default: the process's) and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    top = _top_parser()
    name = top.parse_args(arguments[:1]).command
    if name is None:
        top.print_help()
        return 0
    command = cast("Command", importlib.import_module(f"freetoken.cli.{name}"))
    parser = OneLineParser(prog=f"ft {name}", description=COMMANDS[name], allow_abbrev=False)
    command.add_arguments(parser)
    try:
        return command.execute(parser.parse_args(arguments[1:]))
    except (ConfigError, WeightError) as error:
        print(f"ft: error: {error}", file=sys.stderr)
        return EXIT_SETTINGS
    except FreeTokenError as error:
        print(f"ft: error: {error}", file=sys.stderr)
        return EXIT_FAULT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _top_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    parser = OneLineParser(
        prog="ft",
        description="FreeToken: a local Mixture-of-Experts inference engine.",
        epilog="commands:\n"
        + "\n".join(lines)
        + "\n\n`ft COMMAND --help` lists a command's flags.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"freetoken {__version__}")
    parser.add_argument("command", nargs="?", choices=list(COMMANDS), metavar="COMMAND")
    return parser
