"""`ft`: help, exit codes, and the first chat against a scripted server."""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from freetoken import __version__
from freetoken.cli import main as cli
from freetoken.cli import run as run_command
from freetoken.cli.flags import add_config_flags, read_config
from freetoken.cli.progress import LoadingBar
from freetoken.config import KEYS
from freetoken.errors import ConfigError, DeviceError, FreeTokenError, WeightError
from freetoken.types import Progress
from tests.server.serving import reply, serving


@pytest.fixture(autouse=True)
def _no_settings_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The person's own environment must not change a test."""
    for key in KEYS:
        monkeypatch.delenv(key.variable, raising=False)


def test_help_lists_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a command that nobody can find."""
    assert cli.main([]) == 0
    bare = capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out == bare
    assert all(f"  {name}" in bare and text in bare for name, text in cli.COMMANDS.items())


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_command_help_lists_every_setting(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches flags, environment names or defaults that help does not show."""
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for key in KEYS:
        assert f"{key.flag} " in text
        assert key.variable in text
        assert key.help in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a version that bug reports cannot quote."""
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"freetoken {__version__}\n"


def test_help_imports_no_torch() -> None:
    """Catches a help text that takes two seconds."""
    code = (
        "import sys\nfrom freetoken.cli.main import main\n"
        "for c in ('serve', 'run'):\n"
        "    try: main([c, '--help'])\n"
        "    except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing"], "choose from"),
        (["serve", "--prot", "1"], "unrecognized arguments: --prot 1.*did you mean --port?"),
        (["serve", "--por=1"], "did you mean --port?"),
        (["serve", "--model"], "argument --model: expected one argument"),
        (["--bogus"], "unrecognized arguments: --bogus"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, list) else "",
)
def test_unknown_command_or_flag_exits_2_with_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a misspelt or shortened flag that is taken for another, or told under a page of
    usage.
    """
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("ft: error: ")
    assert error.count("\n") == 1
    assert re.search(text, error)


def test_wrong_setting_exits_2_with_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a traceback for a wrong setting."""
    assert cli.main(["serve", "--port", "99999"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ft: error: --port: expected an integer from 0 to 65535, got '99999'")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (WeightError("x"), 2),
        (DeviceError("x"), 1),
        (FreeTokenError("x"), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, BaseException) else str(v),
)
def test_error_class_decides_the_exit_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches scripts that cannot tell a wrong setting from a broken device."""

    def execute(_arguments: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(run_command, "execute", execute)
    assert cli.main(["run"]) == code


def test_flags_become_settings(tmp_path: Path) -> None:
    """Catches a flag that is parsed and forgotten."""
    toml = tmp_path / "c.toml"
    toml.write_text("[model]\ndemo = true\n[server]\nhost = 'h'\n")
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    words = ["--config", str(toml), "--no-demo", "--port", "0", "--num-tokens", "64"]
    config = read_config(parser.parse_args(words), {"FREETOKEN_NUM_TOKENS": "32"})
    assert not config.model.demo
    assert (config.server.host, config.server.port) == ("h", 0)
    assert config.engine.num_tokens == 64


def test_first_chat_prints_the_streamed_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches `ft run` showing nothing of the answer."""

    async def main() -> str:
        async with serving(reply("The capital is Paris.")) as site:
            return await run_command.first_chat(site.url, run_command.QUESTION)

    assert asyncio.run(main()) == "The capital is Paris."
    out = capsys.readouterr().out
    assert out == f"> {run_command.QUESTION}\nThe capital is Paris.\n"


def test_first_chat_that_fails_gives_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a smoke test that passes on half an answer."""

    async def main() -> str:
        async with serving(reply("Paris", finish="error")) as site:
            return await run_command.first_chat(site.url, "Where?")

    assert asyncio.run(main()) == ""
    assert "ft: error: the server ended the answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "expected", "code"),
    [("Paris.", "Paris", 0), ("Rome.", "Paris", 1), ("x", None, 0), (" ", None, 1), ("", "", 1)],
)
def test_verdict_of_once(answer: str, expected: str | None, code: int) -> None:
    """Catches a smoke test that passes without the right answer."""
    assert run_command.verdict(answer, expected) == code


def test_loading_bar_draws_bytes_and_step_on_a_terminal() -> None:
    """Catches a silent minute while a model is fetched."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    progress = Progress("loading", "fetching weights", 50_000_000, 100_000_000)
    with LoadingBar(progress, console) as bar:
        bar.close()
    assert "fetching weights" in screen.getvalue()
    assert "50.0 MB of 100.0 MB" in screen.getvalue()


def test_loading_bar_is_silent_in_a_log() -> None:
    """Catches control characters in log files."""
    screen = io.StringIO()
    with LoadingBar(Progress("loading", "x", 1, 2), Console(file=screen)):
        pass
    assert screen.getvalue() == ""


def test_module_runs_as_program() -> None:
    """Catches a broken `python -m freetoken`."""
    done = subprocess.run(
        [sys.executable, "-m", "freetoken", "--version"],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},  # noqa: TID251 - for the child
    )
    assert done.stdout.decode().strip() == f"freetoken {__version__}"
