"""The script of a fake engine: a JSON file of replies (`ft serve --fake SCRIPT.json`), read and
checked before serving.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from freetoken.chat.tokenizer import Tokenizer
from freetoken.engine.fake import ScriptedReply
from freetoken.errors import ConfigError


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One reply, as text or as token ids. The last reply of a script repeats."""

    text: str | None = None
    ids: tuple[Annotated[int, Meta(ge=0)], ...] | None = None
    tokens_per_step: Annotated[int, Meta(ge=1)] = 1
    delay_ms: Annotated[float, Meta(ge=0)] = 0.0
    """Time of each step that holds this reply."""
    finish: Literal["stop", "length", "error"] = "stop"


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a fake engine is and says."""

    replies: Annotated[tuple[Reply, ...], Meta(min_length=1)]
    context: Annotated[int, Meta(ge=2)] = 32768
    tokenizer: str | None = None
    """A folder or GGUF file; the demo model's by default. A relative path starts at the script's
    folder.
    """
    chat_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None


def read_script(path: Path) -> Script:
    """Read and check a script file. Raises ConfigError naming the file and the field."""
    try:
        script = msgspec.json.decode(path.read_bytes(), type=Script)
    except OSError as error:
        raise ConfigError(f"--fake: cannot read the script {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--fake: the script {path} is wrong: {error}") from error
    for i, reply in enumerate(script.replies):
        if (reply.text is None) == (reply.ids is None):
            raise ConfigError(
                f"--fake: {path}: expected either text or ids at `$.replies[{i}]`, got"
                f" {'none' if reply.text is None else 'both'}"
            )
    for name in ("tool_call_parser", "reasoning_parser"):
        if getattr(script, name) is not None:
            raise ConfigError(f"--fake: {path}: `$.{name}` is not supported yet; leave it out")
    return script


def encode_replies(script: Script, tokenizer: Tokenizer) -> list[ScriptedReply]:
    """Replies as token ids. Special tokens written in a text become that token, as a model would
    say it.
    """
    replies: list[ScriptedReply] = []
    for i, reply in enumerate(script.replies):
        ids = (
            tuple(tokenizer.encode(reply.text, add_special=False))
            if reply.text is not None
            else reply.ids or ()
        )
        if ids and max(ids) >= tokenizer.vocab_size:
            raise ConfigError(
                f"--fake: expected ids below {tokenizer.vocab_size}, got {max(ids)},"
                f" at `$.replies[{i}].ids`"
            )
        replies.append(
            ScriptedReply(ids, reply.tokens_per_step, reply.delay_ms / 1000, reply.finish)
        )
    return replies
