"""The engine as text: chats and prompts in, text deltas out. Stands on `TokenEngine`; knows no
HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from freetoken.chat.prompt import PromptWriter, Rendered
from freetoken.chat.stops import StopScanner
from freetoken.chat.template import ChatTemplate
from freetoken.chat.tokenizer import Tokenizer
from freetoken.errors import RequestError
from freetoken.types import Finish, Ids, SamplingParams, TokenChunk, TokenEngine, TokenLogprob

THREAD_CHARS = 2000
"""Longer texts are tokenised in a worker thread. 2000 characters take 1 ms in the loop (2 M
characters/s on one core of a shared server, December 2026), a hop to a thread 60 us; half gains
nothing, double shows in the gaps between other streams' tokens."""


@dataclass(slots=True)
class TextDelta:
    """What one engine chunk adds to a reply's text.

    `ids` are the tokens it came from, also while their text is held back; after a stop match they
    end with the token that completed it. `logprobs`, if asked for, has one entry a token of `ids`.
    `finish` is set on the last delta only.
    """

    text: str
    finish: Finish | None
    stop: str | None
    """The stop string that ended the reply; it is not part of the text."""
    ids: list[int]
    logprobs: list[TokenLogprob] | None
    cached_tokens: int


class TextModel:
    """A served model, text in and text out."""

    def __init__(
        self, engine: TokenEngine, tokenizer: Tokenizer, template: ChatTemplate | None
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self._writer = None if template is None else PromptWriter(tokenizer, template)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Return a chat as prompt text and ids.

        Raises RequestError: code `no_chat_template` if the model has none, `chat_template_error`
        with the template's own words if it refuses the messages.
        """
        if self._writer is None:
            raise RequestError(
                "expected a model with a chat template, but this one has none; use /v1/completions,"
                " or start the server with --chat-template FILE",
                param="messages",
                code="no_chat_template",
            )
        return self._writer.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs,
        )

    async def render_async(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """`render`, in a worker thread if the chat is long."""
        settings: dict[str, Any] = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "template_kwargs": template_kwargs,
        }
        if _is_long((messages, tools)):
            return await asyncio.to_thread(self.render, messages, **settings)
        return self.render(messages, **settings)

    async def encode(self, text: str) -> list[int]:
        """Return the ids of a raw prompt, with the model's prefix (BOS). Special tokens in it are
        special.
        """
        if len(text) > THREAD_CHARS:
            return await asyncio.to_thread(self.tokenizer.encode, text, add_special=True)
        return self.tokenizer.encode(text, add_special=True)

    async def stream(
        self, prompt: Ids, params: SamplingParams, *, request_id: str
    ) -> AsyncGenerator[TextDelta, None]:
        """Continue `prompt`; one delta a step, possibly without text.

        Ends with the engine, or at a stop string: then the engine's stream is closed first, so that
        nothing is computed for text nobody gets. Closing this generator closes the engine's. Raises
        what the engine raises.
        """
        pipe = _TextPipe(self.tokenizer, prompt, params)
        last: TextDelta | None = None
        async with aclosing(self.engine.generate(prompt, params, request_id=request_id)) as chunks:
            async for chunk in chunks:
                delta = pipe.push(chunk)
                if delta.finish is not None:
                    last = delta
                    break
                yield delta
        # An engine stream that just ends was aborted from elsewhere; the text held back is still
        # the client's.
        yield last or pipe.push(TokenChunk(ids=[], finish="abort"))


class _TextPipe:
    """One reply's way from ids to text: detokenizer, then stop strings; the last text goes the same
    way.
    """

    __slots__ = ("_detokenizer", "_ends", "_scanner")

    def __init__(self, tokenizer: Tokenizer, prompt: Ids, params: SamplingParams) -> None:
        self._detokenizer = tokenizer.detokenizer(prompt)
        self._scanner = StopScanner(params.stop) if params.stop else None
        self._ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self._ends |= tokenizer.eos_ids

    def push(self, chunk: TokenChunk) -> TextDelta:
        if chunk.finish is None and self._scanner is None:
            text = self._detokenizer.push(chunk.ids)
            return TextDelta(text, None, None, chunk.ids, chunk.logprobs, chunk.cached_tokens)
        return self._push_carefully(chunk)

    def _push_carefully(self, chunk: TokenChunk) -> TextDelta:
        ids, finish, logprobs = chunk.ids, chunk.finish, chunk.logprobs
        visible = ids
        # The token that ended the reply is counted but is no text, even if it is an ordinary word
        # (stop_token_ids).
        if finish == "stop" and ids and ids[-1] in self._ends:
            visible = ids[:-1]
        text, used, stop = self._scan(visible, is_last=finish is not None)
        if stop is not None:
            finish, ids = "stop", ids[:used]
            logprobs = None if logprobs is None else logprobs[:used]
        return TextDelta(text, finish, stop, ids, logprobs, chunk.cached_tokens)

    def _scan(self, ids: Sequence[int], *, is_last: bool) -> tuple[str, int, str | None]:
        """Return the text let through, how many ids it took, and the stop string met.

        Ids go one by one: those after the match were computed ahead and count as never made.
        """
        scanner = self._scanner
        if scanner is None:
            text = self._detokenizer.push(ids)
            return text + (self._detokenizer.flush() if is_last else ""), len(ids), None
        text = ""
        for used, token in enumerate(ids, 1):
            text += scanner.push(self._detokenizer.push((token,)))
            if scanner.match is not None:
                return text, used, scanner.match
        if is_last:
            text += scanner.push(self._detokenizer.flush())
            if scanner.match is None:
                text += scanner.flush()
        return text, len(ids), scanner.match


def _is_long(value: object) -> bool:
    """Whether the strings in a tree of dicts and lists have over THREAD_CHARS characters in all."""
    room = THREAD_CHARS
    rest: list[object] = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            room -= len(item)
            if room < 0:
                return True
        elif isinstance(item, Mapping):
            fields = cast("Mapping[object, object]", item)
            rest += [*fields.keys(), *fields.values()]
        elif isinstance(item, (list, tuple)):
            rest += cast("Sequence[object]", item)
    return False
