"""POST /v1/completions, streamed or whole: raw prompts, several of them if wanted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import msgspec
from aiohttp import web

from freetoken.chat.text_model import TextDelta, TextModel
from freetoken.errors import ContextTooLong, RequestError
from freetoken.server import choices as replies
from freetoken.server.body import decode
from freetoken.server.choices import Choice
from freetoken.server.http import EVENT_STREAM, call_id, json_response
from freetoken.server.logprobs import completion_logprobs
from freetoken.server.sampling import (
    SamplingDefaults,
    for_choice,
    refuse_unsupported,
    sampling_params,
)
from freetoken.server.schema import MAX_CHOICES, CompletionRequest, completion_decoder
from freetoken.server.sse import EventStream
from freetoken.server.state import SERVER_CONFIG, STATE
from freetoken.server.usage import usage, wants_usage
from freetoken.types import TokenLogprob

_encode = msgspec.json.Encoder().encode
_TEXT_TAIL = b',"logprobs":null,"finish_reason":null}]}\n\n'
_DEFAULT_MAX_TOKENS = 16
"""OpenAI's default on this route; chats run to the end of the context instead."""


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one or several raw prompts. Everything that can be refused is refused before the
    status line.
    """
    body = decode(await request.read(), completion_decoder)
    state = request.app[STATE]
    model = state.model(body.model)
    _check_fields(body)
    reply_id = call_id(request, "cmpl-")
    prompts = await _prompts(model, body.prompt)
    choices = _choices(model, body, state.sampling_defaults, prompts, reply_id)
    try:
        replies.check_room(model, choices)
    except ContextTooLong as error:
        raise ContextTooLong(error.prompt_tokens, error.limit, param="prompt") from error
    header = {"id": reply_id, "created": int(time.time()), "model": model.engine.card.id}
    firsts = choices[:: body.n or 1]
    echoes = _echoes(model, body, choices)
    if not body.stream:
        await replies.collect(model, choices)
        return json_response(_whole(model, header, choices, firsts, echoes))
    frames = CompletionFrames(model, header, firsts=firsts if wants_usage(body) else None)
    opening = frames.opening(choices, echoes)
    events = EventStream(request, request.app[SERVER_CONFIG].keep_alive_s, opening)
    request[EVENT_STREAM] = events
    await replies.stream(model, choices, frames, events)
    return events.response


def _check_fields(body: CompletionRequest) -> None:
    refuse_unsupported(body)
    if body.suffix:
        raise RequestError(
            "suffix: expected none, got text; this model cannot fill in the middle", param="suffix"
        )
    if body.best_of is not None and body.best_of > 1:
        raise RequestError(
            f"best_of: expected 1 or none, got {body.best_of}; use n", param="best_of"
        )
    if body.echo and body.logprobs is not None:
        raise RequestError(
            "echo: expected false beside logprobs, got true;"
            " log-probabilities of a prompt are not computed",
            param="echo",
        )


def _choices(
    model: TextModel,
    body: CompletionRequest,
    defaults: SamplingDefaults,
    prompts: list[list[int]],
    reply_id: str,
) -> list[Choice]:
    n = body.n or 1
    if n * len(prompts) > MAX_CHOICES:
        raise RequestError(
            f"prompt: expected at most {MAX_CHOICES} replies a call,"
            f" got {len(prompts)} prompts times n = {n}",
            param="prompt",
        )
    params = sampling_params(
        body,
        defaults,
        model.engine.card,
        max_tokens=_DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
    )
    return [
        Choice(p * n + i, f"{reply_id}-{p * n + i}", prompt, for_choice(params, i))
        for p, prompt in enumerate(prompts)
        for i in range(n)
    ]


async def _prompts(model: TextModel, prompt: object) -> list[list[int]]:
    if prompt is None:
        prompt = ""
    if isinstance(prompt, str):
        return [await _encoded(model, prompt, "prompt")]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(
            "prompt: expected a string, token ids or a list of either, got "
            + ("an empty list" if prompt == [] else "something else"),
            param="prompt",
        )
    items = cast("list[object]", prompt)
    if len(items) > MAX_CHOICES and not _is_id(items[0]):
        raise RequestError(
            f"prompt: expected at most {MAX_CHOICES} prompts, got {len(items)}", param="prompt"
        )
    if _is_id(items[0]):
        return [_ids(model, items, "prompt")]
    prompts: list[list[int]] = []
    for i, item in enumerate(items):
        where = f"prompt[{i}]"
        if isinstance(item, str):
            prompts.append(await _encoded(model, item, where))
        elif isinstance(item, list) and item:
            prompts.append(_ids(model, cast("list[object]", item), where))
        else:
            raise RequestError(
                f"{where}: expected a string or a list of token ids, got something else",
                param=where,
            )
    return prompts


async def _encoded(model: TextModel, text: str, where: str) -> list[int]:
    ids = await model.encode(text)
    if ids:
        return ids
    start = model.tokenizer.bos_id
    if start is None:
        # Vocabularies without a start token (GPT-2) begin documents with their end token.
        start = min(model.engine.card.eos_ids, default=None)
    if start is None:
        raise RequestError(
            f"{where}: expected text, got none, and this model has no start token", param=where
        )
    return [start]


def _ids(model: TextModel, items: list[object], where: str) -> list[int]:
    vocab = model.engine.card.vocab
    for i, item in enumerate(items):
        if not _is_id(item) or not 0 <= cast("int", item) < vocab:
            raise RequestError(
                f"{where}[{i}]: expected a token id from 0 to {vocab - 1}, got {item!r:.80}",
                param=f"{where}[{i}]",
            )
    return cast("list[int]", items)


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _echoes(model: TextModel, body: CompletionRequest, choices: Sequence[Choice]) -> list[str]:
    if not body.echo:
        return [""] * len(choices)
    if isinstance(body.prompt, str):
        return [body.prompt] * len(choices)
    return [model.tokenizer.decode(choice.prompt) for choice in choices]


class CompletionFrames:
    """Writes completion chunks. All that is the same in every chunk of a choice is encoded once."""

    def __init__(
        self, model: TextModel, header: dict[str, Any], *, firsts: Sequence[Choice] | None
    ) -> None:
        self._tokenizer = model.tokenizer
        self._head = b"data: " + _encode({"object": "text_completion"} | header).removesuffix(b"}")
        self._text_heads: dict[int, bytes] = {}
        self._offsets: dict[int, int] = {}
        self._firsts = firsts

    def opening(self, choices: Sequence[Choice], echoes: Sequence[str]) -> bytes:
        """Return the frames before the first delta: echoed prompts, else nothing."""
        for choice in choices:
            self._text_heads[choice.index] = (
                self._head + b',"choices":[{"index":%d,"text":' % choice.index
            )
            self._offsets[choice.index] = 0
        return b"".join(
            self._text_heads[choice.index] + _encode(echo) + _TEXT_TAIL
            for choice, echo in zip(choices, echoes, strict=True)
            if echo
        )

    def delta(self, choice: Choice, delta: TextDelta) -> bytes:
        """Return the frames of one delta; a held-back delta gives none, its log-probabilities wait
        for the next text.
        """
        text = delta.text
        if delta.finish is None and delta.logprobs is None:
            return self._text_heads[choice.index] + _encode(text) + _TEXT_TAIL if text else b""
        choice.logprobs += delta.logprobs or ()
        if not text and delta.finish is None:
            return b""
        frame = {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, choice.logprobs),
            "finish_reason": delta.finish,
        }
        choice.logprobs = []
        return self._head + b',"choices":[' + _encode(frame) + b"]}\n\n"

    def ending(self, choices: Sequence[Choice]) -> bytes:
        """Return the usage chunk if it was asked for."""
        if self._firsts is None:
            return b""
        return (
            self._head
            + b',"choices":[],"usage":'
            + _encode(usage(choices, self._firsts))
            + b"}\n\n"
        )

    def _logprobs(self, choice: Choice, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not entries:
            return None
        shape = completion_logprobs(self._tokenizer, entries, self._offsets[choice.index])
        self._offsets[choice.index] = shape["text_offset"][-1] + len(shape["tokens"][-1])
        return shape


def _whole(
    model: TextModel,
    header: dict[str, Any],
    choices: Sequence[Choice],
    firsts: Sequence[Choice],
    echoes: Sequence[str],
) -> dict[str, Any]:
    return {
        "id": header["id"],
        "object": "text_completion",
        **header,
        "choices": [
            {
                "index": choice.index,
                "text": echo + choice.text,
                "logprobs": completion_logprobs(model.tokenizer, choice.logprobs, 0)
                if choice.params.logprobs is not None
                else None,
                "finish_reason": choice.finish,
            }
            for choice, echo in zip(choices, echoes, strict=True)
        ],
        "usage": usage(choices, firsts),
    }
