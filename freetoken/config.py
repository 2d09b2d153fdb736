"""Every setting: name, type, range, default, flag, environment name and TOML key, all from the
annotations below.

The only reader of the environment. Knows no engine and no HTTP; what a setting does is told in its
description, and `KEYS` is the one table from which flags, help text, environment names and TOML
keys are made.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import msgspec
from msgspec import Meta, Struct
from msgspec.inspect import (
    BoolType,
    FloatType,
    IntType,
    LiteralType,
    Metadata,
    NoneType,
    StrType,
    StructType,
    Type,
    UnionType,
)

from freetoken.errors import ConfigError

ENVIRONMENT_PREFIX = "FREETOKEN_"
CONFIG_VARIABLE = "FREETOKEN_CONFIG"
"""Names the TOML file when --config does not."""

_NATIVE_VARIABLES = "FREETOKEN_NATIVE_"
"""Read by the build of the native library, not by the server: not refused as unknown settings."""


def _key(help_text: str, *, flag: str | None = None, **limits: Any) -> Meta:  # noqa: ANN401
    """A setting's annotation. `flag` only where it is not the field's own name."""
    return Meta(description=help_text, extra={} if flag is None else {"flag": flag}, **limits)


Tokens = Annotated[int, Meta(ge=2)]
"""One for the prompt and one for the reply is the least that can be served."""


Text = Annotated[str, Meta(min_length=1)]
"""An empty path would mean the working folder to one and nothing to the other."""


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What is served and in which form. One of `path`, `demo`, `fake` names the model."""

    path: Annotated[
        Text | None,
        _key("checkpoint: a folder with safetensors, a GGUF file, or the word demo", flag="model"),
    ] = None
    demo: Annotated[
        bool, _key("serve the small demo model, fetched once into the cache folder")
    ] = False
    fake: Annotated[
        Text | None, _key("serve scripted replies from this JSON file instead of a model")
    ] = None
    served_name: Annotated[
        Text | None,
        _key(
            "model id that clients use; default: the checkpoint's own name",
            flag="served-model-name",
        ),
    ] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], _key("where the model runs")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        _key("number format of activations and plain weights"),
    ] = "auto"
    chat_template: Annotated[
        Text | None, _key("Jinja chat template file that replaces or supplies the checkpoint's own")
    ] = None
    sampling_defaults: Annotated[
        Literal["model", "openai"],
        _key(
            "what a request leaves out: the model's generation_config, or temperature 1 and top_p 1"
        ),
    ] = "model"
    cache_dir: Annotated[
        str,
        _key("folder for fetched models; default: freetoken under XDG_CACHE_HOME or ~/.cache"),
    ] = ""


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of scheduling and of KV memory."""

    max_running_requests: Annotated[
        int, _key("sequences computed at the same time", ge=1, le=4096)
    ] = 8
    max_seq_len: Annotated[
        Tokens | None,
        _key("longest prompt and reply together, in tokens; default: the model's own limit"),
    ] = None
    max_prefill_length: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        _key("most prompt tokens computed in one step; default: 512 on a CPU, 8192 on a GPU"),
    ] = None
    cuda_graphs: Annotated[bool, _key("run decode steps on a GPU as captured graphs")] = True
    num_tokens: Annotated[
        Tokens | None,
        _key("KV capacity in tokens, all sequences together; default: planned from memory"),
    ] = None
    page_size: Annotated[int, _key("tokens in one KV page", ge=1, le=4096)] = 16
    cache_type: Annotated[
        Literal["radix", "naive"],
        _key("radix reuses the KV of shared prompt beginnings, naive reuses nothing"),
    ] = "radix"
    max_queue: Annotated[
        int, _key("requests that may wait; the next one is answered 429", ge=1)
    ] = 256


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP side."""

    host: Annotated[str, _key("address to listen on", min_length=1)] = "127.0.0.1"
    port: Annotated[int, _key("TCP port; 0 takes any free one", ge=0, le=65535)] = 1919
    keep_alive_s: Annotated[
        float,
        _key(
            "seconds of silence in a stream after which a comment line keeps it open", gt=0, le=3600
        ),
    ] = 10.0
    drain_s: Annotated[
        float,
        _key("seconds that running requests get to finish after SIGTERM or Ctrl-C", ge=0, le=86400),
    ] = 30.0
    max_body_bytes: Annotated[int, _key("largest request body", ge=1024, le=2**31)] = 32 * 2**20
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], _key("least severe message shown")
    ] = "info"


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """All settings. Immutable after `load_config`."""

    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()


@dataclass(frozen=True, slots=True)
class Key:
    """One setting as a row of the table."""

    section: str
    field: str
    flag: str
    """With dashes in front: `--max-running-requests`."""
    help: str
    default: object
    expected: str
    """What a value must be, in words: `an integer from 0 to 65535`."""
    choices: tuple[str, ...]
    is_switch: bool
    annotation: Any

    @property
    def path(self) -> str:
        """The TOML key: `server.port`."""
        return f"{self.section}.{self.field}"

    @property
    def variable(self) -> str:
        """The environment name: the flag's, in capitals (`FREETOKEN_PORT`)."""
        return ENVIRONMENT_PREFIX + self.flag.removeprefix("--").replace("-", "_").upper()

    def convert(self, value: object, where: str, *, is_text: bool) -> object:
        """Return `value` as the setting's type, or raise ConfigError. `is_text`: it came as a word,
        not as a typed value.
        """
        try:
            return msgspec.convert(value, self.annotation, strict=not is_text)
        except msgspec.ValidationError:
            raise ConfigError(
                f"{where}: expected {self.expected}, got {value!r} ({self.help})"
            ) from None


def _table() -> tuple[Key, ...]:
    root = msgspec.inspect.type_info(Config)
    assert isinstance(root, StructType)
    return tuple(key for section in root.fields for key in _section(section.name, section.type))


def _section(name: str, info: Type) -> Iterator[Key]:
    assert isinstance(info, StructType)
    for field, annotation in zip(info.fields, _annotations(info.cls), strict=True):
        meta = field.type
        assert isinstance(meta, Metadata)
        choices = _choices(meta.type, annotation)
        extra = cast("dict[str, str]", meta.extra or {})
        schema = cast("dict[str, str]", meta.extra_json_schema or {})
        yield Key(
            section=name,
            field=field.name,
            flag="--" + extra.get("flag", field.name.replace("_", "-")),
            help=schema["description"],
            default=field.default,
            expected="one of " + ", ".join(choices) if choices else _expected(meta.type),
            choices=choices,
            is_switch=isinstance(meta.type, BoolType),
            annotation=annotation,
        )


def _annotations(struct: type[Any]) -> list[Any]:
    return [f.type for f in msgspec.structs.fields(struct)]


def _choices(info: Type, annotation: object) -> tuple[str, ...]:
    # From the annotation, in the order written there: the inspected type has them sorted.
    return get_args(get_args(annotation)[0]) if isinstance(info, LiteralType) else ()


def _expected(info: Type) -> str:
    if isinstance(info, Metadata):
        return _expected(info.type)
    if isinstance(info, UnionType):
        return next(_expected(t) for t in info.types if not isinstance(t, NoneType))
    if isinstance(info, BoolType):
        return "true or false"
    if isinstance(info, IntType | FloatType):
        kind = "an integer" if isinstance(info, IntType) else "a number"
        bounds = [
            f"{word} {limit}"
            for word, limit in (
                ("from", info.ge),
                ("above", info.gt),
                ("to", info.le),
                ("below", info.lt),
            )
            if limit is not None
        ]
        return " ".join([kind, *bounds])
    return "text that is not empty" if isinstance(info, StrType) and info.min_length else "text"


KEYS: tuple[Key, ...] = _table()

_BY_PATH = {key.path: key for key in KEYS}
_BY_VARIABLE = {key.variable: key for key in KEYS}

_FILES = ("model.path", "model.fake", "model.chat_template", "model.cache_dir")
"""A shell expands `~` in flags; in TOML and `KEY=~/x make run` nobody does."""

Values = dict[str, object]
"""Settings of one source, by TOML key."""


def load_config(
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    toml: Path | None = None,
) -> Config:
    """Merge defaults < TOML < environment < flags into one Config.

    flags    by TOML key (`server.port`), only those that were given
    environ  default: the process's own
    toml     default: the file named by FREETOKEN_CONFIG, else none
    Raises ConfigError that says what was expected, what was found, where and what to do.
    """
    environ = os.environ if environ is None else environ
    if toml is None and environ.get(CONFIG_VARIABLE):
        toml = Path(environ[CONFIG_VARIABLE]).expanduser()
    merged: Values = {}
    for source in (
        _from_toml(toml) if toml else {},
        _from_environment(environ),
        _from_flags(flags or {}),
    ):
        _overlay(merged, source)
    if not merged.get("model.cache_dir"):
        merged["model.cache_dir"] = str(_default_cache(environ))
    for path in _FILES:
        if merged.get(path):
            merged[path] = str(Path(str(merged[path])).expanduser())
    sections: dict[str, dict[str, object]] = {}
    for path, value in merged.items():
        section, field = path.split(".")
        sections.setdefault(section, {})[field] = value
    config = msgspec.convert(sections, Config)
    _check_together(config)
    return config


def _from_toml(path: Path) -> Values:
    try:
        document: dict[str, object] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"expected a readable TOML file, got {error.strerror}: {path};"
            f" correct --config or {CONFIG_VARIABLE}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"expected TOML, got something else in {path}: {error}") from error
    values: Values = {}
    sections = list(Config.__struct_fields__)
    for section, table in document.items():
        if section not in sections or not isinstance(table, dict):
            raise ConfigError(
                f"{path}: expected the tables {', '.join(f'[{s}]' for s in sections)},"
                f" got `$.{section}`{_suggestion(section, sections)}"
            )
        for field, value in cast("dict[str, object]", table).items():
            key = _BY_PATH.get(f"{section}.{field}")
            if key is None:
                known = [k.field for k in KEYS if k.section == section]
                raise ConfigError(
                    f"{path}: expected a key of [{section}] ({', '.join(known)}),"
                    f" got unknown `$.{section}.{field}`{_suggestion(field, known)}"
                )
            values[key.path] = key.convert(value, f"{path}: `$.{key.path}`", is_text=False)
    return values


def _from_environment(environ: Mapping[str, str]) -> Values:
    values: Values = {}
    for name, text in environ.items():
        is_ours = name.startswith(ENVIRONMENT_PREFIX) and not name.startswith(_NATIVE_VARIABLES)
        if not is_ours or name == CONFIG_VARIABLE or not text:
            continue
        key = _BY_VARIABLE.get(name)
        if key is None:
            known = list(_BY_VARIABLE)
            raise ConfigError(
                f"environment: expected a known setting, got {name}{_suggestion(name, known)};"
                " unset it, or see `ft serve --help` for the names"
            )
        values[key.path] = key.convert(text, f"environment variable {name}", is_text=True)
    return values


def _from_flags(flags: Mapping[str, object]) -> Values:
    values: Values = {}
    for path, value in flags.items():
        key = _BY_PATH[path]
        values[path] = key.convert(value, key.flag, is_text=isinstance(value, str))
    return values


def _overlay(merged: Values, source: Values) -> None:
    """Put one source over the lower ones. Naming a model there forgets every model named lower
    down.
    """
    if source.get("model.path") == "demo":
        source["model.path"] = None
        source["model.demo"] = True
    named = [path for path in ("model.path", "model.demo", "model.fake") if source.get(path)]
    if len(named) > 1:
        flags = " and ".join(_BY_PATH[path].flag for path in named)
        raise ConfigError(f"expected one model, got {flags} together; leave all but one out")
    if named:
        for path in ("model.path", "model.demo", "model.fake"):
            merged.pop(path, None)
    merged.update(source)


def _default_cache(environ: Mapping[str, str]) -> Path:
    root = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path there.
    return (Path(root) if Path(root).is_absolute() else Path.home() / ".cache") / "freetoken"


def _check_together(config: Config) -> None:
    engine = config.engine
    if engine.num_tokens is not None and engine.num_tokens < engine.page_size:
        raise ConfigError(
            f"--num-tokens: expected at least one page of {engine.page_size} tokens,"
            f" got {engine.num_tokens}; raise it or lower --page-size"
        )


def _suggestion(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean `{close[0]}`?" if close else ""
