"""Writes docs/flags.md from the table of settings: `python -m tests.rules.flags`."""

from __future__ import annotations

from freetoken.config import CONFIG_VARIABLE, KEYS, Key
from tests.rules.size import ROOT

PAGE = ROOT / "docs" / "flags.md"

_TITLES = {"model": "What is served", "engine": "Limits of the engine", "server": "The HTTP side"}


def page() -> str:
    """The whole page."""
    lines = [
        "# Settings",
        "",
        "Each is a flag of `ft serve` and `ft run`, a key of a TOML file (`--config FILE` or"
        f" `{CONFIG_VARIABLE}`), and",
        "an environment name. A flag beats the environment, which beats the file. An unknown key,"
        " name or flag, and a value",
        "out of range, is an error at start (exit code 2). Made by `python -m tests.rules.flags`"
        " from freetoken/config.py.",
    ]
    for section, title in _TITLES.items():
        lines += ["", f"## {title}: `[{section}]`", ""]
        lines += ["| flag | environment | TOML key | value | default | what |"]
        lines += ["| --- | --- | --- | --- | --- | --- |"]
        lines += [_row(key) for key in KEYS if key.section == section]
    return "\n".join(lines) + "\n"


def _row(key: Key) -> str:
    default = "" if key.default in (None, "") else f"`{str(key.default).lower()}`"
    flag = f"`{key.flag}`" + (f", `--no-{key.flag.removeprefix('--')}`" if key.is_switch else "")
    value = key.expected.removeprefix("one of ")
    cells = [flag, f"`{key.variable}`", f"`{key.field}`", value, default, key.help]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
