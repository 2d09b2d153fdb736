"""What the documents say is what the program does."""

from __future__ import annotations

import re

import msgspec
import pytest

from freetoken.app import EXIT_CUT_OFF, EXIT_FAULT, EXIT_OK
from freetoken.cli.main import COMMANDS, EXIT_INTERRUPTED, EXIT_SETTINGS, main
from freetoken.config import KEYS, ServerConfig
from freetoken.server.application import build_application
from freetoken.server.http import STATUSES
from freetoken.server.schema import ChatRequest, CompletionRequest
from freetoken.server.state import ServerState
from tests.rules import flags
from tests.rules.size import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
OWN = {
    *("--help", "--config"),
    *("--prompt", "--once", "--expect"),
    *("--vram", "--ram", "--gbps", "--spec", "--json"),
}
"""Flags of commands that are no settings."""
HTTP = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")


def test_page_of_settings_is_current() -> None:
    """A flag, default or description that the documents tell otherwise than `--help`."""
    assert flags.PAGE.read_text(encoding="utf-8") == flags.page(), "python -m tests.rules.flags"


@pytest.mark.parametrize("command", list(COMMANDS))
def test_help_and_page_name_the_same_flags(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flag that is in one of them only."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    in_help = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsys.readouterr().out)) - OWN
    in_page = set(re.findall(r"`(--[a-z-]+)`", flags.PAGE.read_text(encoding="utf-8")))
    assert in_help <= in_page
    assert {key.flag for key in KEYS} <= in_help


def test_readme_names_only_flags_that_exist() -> None:
    """A README that tells people to type what is refused."""
    switches = {f"--no-{key.flag[2:]}" for key in KEYS if key.is_switch}
    known = {key.flag for key in KEYS} | switches | OWN
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) <= known


@pytest.mark.parametrize("request_type", [ChatRequest, CompletionRequest])
def test_every_request_field_is_documented(request_type: type[msgspec.Struct]) -> None:
    """A field that is honoured, ignored or refused without a word."""
    missing = [name for name in request_type.__struct_fields__ if f"`{name}`" not in HTTP]
    assert missing == []


def test_every_route_and_error_status_is_documented() -> None:
    """A route that nobody knows of, or a status that clients do not expect."""
    app = build_application(ServerState(), ServerConfig())
    paths = {r.resource.canonical for r in app.router.routes() if r.resource is not None}
    own = {path for path in paths if path.startswith("/v1/")} | {"/"}
    assert [path for path in own if f"`{path}`" not in HTTP] == []
    for _, status, kind, code in STATUSES:
        assert f"| {status} |" in HTTP
        assert kind in HTTP
        assert code is None or code in HTTP


def test_every_exit_code_is_documented() -> None:
    """A script that cannot tell why the server ended."""
    codes = (EXIT_OK, EXIT_FAULT, EXIT_SETTINGS, EXIT_CUT_OFF, EXIT_INTERRUPTED)
    assert [code for code in codes if f"| {code} |" not in HTTP] == []
