"""Settings: one table, four sources, errors that say what to do."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from freetoken.config import KEYS, Config, load_config
from freetoken.errors import ConfigError


def test_defaults_are_the_documented_ones() -> None:
    """Catches a default that moved: clients rely on host and port."""
    config = load_config({}, {})
    assert (config.server.host, config.server.port) == ("127.0.0.1", 1919)
    assert (config.engine.max_running_requests, config.engine.page_size) == (8, 16)
    # The device decides the length of a prefill step.
    assert (config.engine.max_prefill_length, config.engine.max_queue) == (None, 256)
    assert config.server.max_body_bytes == 32 * 1024 * 1024


@pytest.mark.parametrize("path", ["model.path", "model.fake", "model.chat_template", "server.host"])
def test_empty_text_is_refused_not_taken_for_the_working_folder(path: str) -> None:
    """Catches `--model "$UNSET"` that looks for a checkpoint wherever one happens to stand."""
    with pytest.raises(ConfigError, match="expected text that is not empty, got ''"):
        load_config({path: ""}, {})


def test_table_holds_every_field_once_with_help() -> None:
    """Catches a setting without flag, environment name or description."""
    fields = [
        f"{section.name}.{field.name}"
        for section in msgspec.structs.fields(Config)
        for field in msgspec.structs.fields(section.type)
    ]
    assert [key.path for key in KEYS] == fields
    assert len({key.flag for key in KEYS}) == len({key.variable for key in KEYS}) == len(KEYS)
    assert all(key.help and key.flag.startswith("--") for key in KEYS)


def test_precedence_is_toml_environment_flag(tmp_path: Path) -> None:
    """Catches a file that beats the environment, or either that beats a flag."""
    toml = tmp_path / "c.toml"
    toml.write_text("[server]\nport = 1\nhost = 'toml'\ndrain_s = 4\n[engine]\npage_size = 32\n")
    environ = {"FREETOKEN_PORT": "2", "FREETOKEN_HOST": "environment"}
    config = load_config({"server.port": "3"}, environ, toml)
    assert (config.server.port, config.server.host) == (3, "environment")
    assert (config.server.drain_s, config.engine.page_size) == (4.0, 32)
    named = load_config({}, {"FREETOKEN_CONFIG": str(toml)})
    assert named.server.port == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[engine]\nmax_bach = 1\n", r"c\.toml.*unknown `\$\.engine\.max_bach`"),
        ("[engine]\npage_sise = 1\n", r"did you mean `page_size`"),
        ("[motor]\nx = 1\n", r"got `\$\.motor`"),
        ("port = 1\n", r"got `\$\.port`"),
        ("[server]\nport = '1919'\n", r"`\$\.server\.port`: expected an integer from 0 to 65535"),
        ("[server]\nport = true\n", r"`\$\.server\.port`.*got True"),
        ("[server\n", r"expected TOML"),
    ],
    ids=["unknown-key", "typo", "unknown-table", "no-table", "text", "bool", "syntax"],
)
def test_wrong_toml_is_refused_with_its_path(tmp_path: Path, text: str, expected: str) -> None:
    """Catches a misspelt key that is silently ignored."""
    toml = tmp_path / "c.toml"
    toml.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        load_config({}, {}, toml)


def test_missing_toml_is_refused() -> None:
    """Catches a --config file that does not exist and is ignored."""
    with pytest.raises(ConfigError, match=r"No such file.*absent\.toml.*--config"):
        load_config({}, {}, Path("absent.toml"))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("server.port", "-1"),
        ("server.port", "65536"),
        ("server.port", "x"),
        ("server.keep_alive_s", "0"),
        ("server.keep_alive_s", "nan"),
        ("server.drain_s", "-1"),
        ("engine.page_size", "0"),
        ("engine.max_running_requests", "0"),
        ("engine.max_seq_len", "1"),
        ("engine.cache_type", "tree"),
        ("model.device", "tpu"),
        ("model.dtype", "int8"),
    ],
)
def test_value_out_of_range_names_its_flag(path: str, value: str) -> None:
    """Catches a nonsense setting that only fails minutes later."""
    key = next(k for k in KEYS if k.path == path)
    with pytest.raises(ConfigError, match=rf"{key.flag}: expected .*got '{value}'"):
        load_config({path: value}, {})
    with pytest.raises(ConfigError, match=rf"environment variable {key.variable}: expected"):
        load_config({}, {key.variable: value})


def test_unknown_environment_name_is_refused() -> None:
    """Catches a misspelt variable that changes nothing; empty and foreign ones are let through."""
    with pytest.raises(ConfigError, match="FREETOKEN_PROT; did you mean `FREETOKEN_PORT`"):
        load_config({}, {"FREETOKEN_PROT": "1"})
    load_config({}, {"FREETOKEN_PORT": "", "PATH": "/bin", "FREETOKEN_NATIVE_X": "1"})


def test_two_models_in_one_source_are_refused() -> None:
    """Catches one of two named models that is dropped silently."""
    with pytest.raises(ConfigError, match="--model and --fake together"):
        load_config({"model.path": "a", "model.fake": "b"}, {})


def test_model_of_a_higher_source_replaces_the_lower_one() -> None:
    """Catches `ft serve --model X` refused since a file says demo = true."""
    config = load_config({"model.path": "x"}, {"FREETOKEN_DEMO": "true"})
    assert (config.model.path, config.model.demo) == ("x", False)


def test_word_demo_means_the_demo_model() -> None:
    """Catches `--model demo` taken for a folder of that name."""
    for flags in ({"model.path": "demo"}, {"model.demo": True}):
        config = load_config(flags, {})
        assert (config.model.path, config.model.demo) == (None, True)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, str(Path.home() / ".cache" / "freetoken")),
        ({"XDG_CACHE_HOME": "/x"}, "/x/freetoken"),
        ({"XDG_CACHE_HOME": "relative"}, str(Path.home() / ".cache" / "freetoken")),
        ({"XDG_CACHE_HOME": "/x", "FREETOKEN_CACHE_DIR": "~/y"}, str(Path.home() / "y")),
    ],
    ids=["default", "xdg", "xdg-relative", "own"],
)
def test_cache_folder(environ: dict[str, str], expected: str) -> None:
    """Catches models fetched into a folder that the user did not choose."""
    assert load_config({}, environ).model.cache_dir == expected


def test_capacity_below_one_page_is_refused() -> None:
    """Catches a KV memory of no page at all."""
    with pytest.raises(ConfigError, match="--num-tokens: expected at least one page of 16"):
        load_config({"engine.num_tokens": "15"}, {})


def test_config_cannot_be_changed() -> None:
    """Catches code that rewrites settings after the start."""
    with pytest.raises(AttributeError):
        load_config({}, {}).server.port = 1
