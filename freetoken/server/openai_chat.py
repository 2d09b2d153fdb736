"""POST /v1/chat/completions, streamed or whole.

`tools` reach the template with tool_choice auto or none; a call that the model then writes is
returned as its text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from freetoken.chat.text_model import TextDelta, TextModel
from freetoken.errors import RequestError
from freetoken.server import choices as replies
from freetoken.server.body import decode
from freetoken.server.choices import Choice
from freetoken.server.http import EVENT_STREAM, call_id, json_response
from freetoken.server.logprobs import chat_logprobs
from freetoken.server.messages import (
    check_modalities,
    template_kwargs,
    template_messages,
    template_tools,
)
from freetoken.server.sampling import (
    SamplingDefaults,
    for_choice,
    refuse_unsupported,
    sampling_params,
)
from freetoken.server.schema import ChatRequest, chat_decoder
from freetoken.server.sse import EventStream
from freetoken.server.state import SERVER_CONFIG, STATE
from freetoken.server.usage import usage, wants_usage

_encode = msgspec.json.Encoder().encode
_TEXT_TAIL = b'},"logprobs":null,"finish_reason":null}]}\n\n'


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer one chat. Everything that can be refused is refused before the status line."""
    body = decode(await request.read(), chat_decoder)
    state = request.app[STATE]
    model = state.model(body.model)
    reply_id = call_id(request, "chatcmpl-")
    choices = await _choices(model, body, state.sampling_defaults, reply_id)
    replies.check_room(model, choices)
    header = {"id": reply_id, "created": int(time.time()), "model": model.engine.card.id}
    if not body.stream:
        await replies.collect(model, choices)
        return json_response(_whole(model, header, choices, has_logprobs=bool(body.logprobs)))
    frames = ChatFrames(model, header, has_usage=wants_usage(body))
    events = EventStream(request, request.app[SERVER_CONFIG].keep_alive_s, frames.opening(choices))
    request[EVENT_STREAM] = events
    await replies.stream(model, choices, frames, events)
    return events.response


async def _choices(
    model: TextModel, body: ChatRequest, defaults: SamplingDefaults, reply_id: str
) -> list[Choice]:
    refuse_unsupported(body)
    check_modalities(body)
    messages, tools, kwargs = (
        template_messages(body.messages),
        template_tools(body),
        template_kwargs(body),
    )
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError(
            "top_logprobs: expected logprobs true beside it, got none", param="top_logprobs"
        )
    params = sampling_params(
        body,
        defaults,
        model.engine.card,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    rendered = await model.render_async(messages, tools=tools, template_kwargs=kwargs)
    return [
        Choice(i, f"{reply_id}-{i}", rendered.ids, for_choice(params, i))
        for i in range(body.n or 1)
    ]


class ChatFrames:
    """Writes chat chunks. All that is the same in every chunk of a choice is encoded once."""

    def __init__(self, model: TextModel, header: dict[str, Any], *, has_usage: bool) -> None:
        self._tokenizer = model.tokenizer
        self._head = b"data: " + _encode(
            {"id": header["id"], "object": "chat.completion.chunk"} | header
        ).removesuffix(b"}")
        self._text_heads: dict[int, bytes] = {}
        self._has_usage = has_usage

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """Return the role chunk of every choice."""
        for choice in choices:
            self._text_heads[choice.index] = (
                self._head + b',"choices":[{"index":%d,"delta":{"content":' % choice.index
            )
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(choice.index, role, None, None) for choice in choices)

    def delta(self, choice: Choice, delta: TextDelta) -> bytes:
        """Return the frames of one delta; a held-back delta gives none, its log-probabilities wait
        for the next text.
        """
        text = delta.text
        if delta.finish is None and delta.logprobs is None:
            return self._text_heads[choice.index] + _encode(text) + _TEXT_TAIL if text else b""
        choice.logprobs += delta.logprobs or ()
        frames = b""
        if text or (delta.finish is not None and choice.logprobs):
            entries = chat_logprobs(self._tokenizer, choice.logprobs) if choice.logprobs else None
            frames = self._chunk(choice.index, {"content": text}, entries, None)
            choice.logprobs = []
        if delta.finish is not None:
            frames += self._chunk(choice.index, {}, None, delta.finish)
        return frames

    def ending(self, choices: Sequence[Choice]) -> bytes:
        """Return the usage chunk if it was asked for."""
        if not self._has_usage:
            return b""
        return (
            self._head + b',"choices":[],"usage":' + _encode(usage(choices, choices[:1])) + b"}\n\n"
        )

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish: str | None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._head + b',"choices":[' + _encode(choice) + b"]}\n\n"


def _whole(
    model: TextModel, header: dict[str, Any], choices: Sequence[Choice], *, has_logprobs: bool
) -> dict[str, Any]:
    return {
        "id": header["id"],
        "object": "chat.completion",
        **header,
        "choices": [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": chat_logprobs(model.tokenizer, choice.logprobs)
                if has_logprobs
                else None,
                "finish_reason": choice.finish,
            }
            for choice in choices
        ],
        "usage": usage(choices, choices[:1]),
    }
