"""The JSON bodies of the OpenAI routes as typed structs. Unknown fields are ignored, null means
absent.

Types and plain ranges are declared here and checked while decoding; what needs the model or two
fields is checked in `sampling.py` and `messages.py`. The structs follow OpenAI's own field lists,
hence their length.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

Number = Annotated[float, Meta(ge=-2.0, le=2.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Unit = Annotated[float, Meta(ge=0.0, le=1.0)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopText = Annotated[str, Meta(min_length=1, max_length=1000)]

MAX_STOPS = 16
"""OpenAI allows 4; agents of local models send more. Each costs a search in every delta."""

MAX_CHOICES = 128
"""Replies of one call, as OpenAI limits n. Each is a sequence of its own in the engine."""


class Sampling(Struct):
    """How tokens are chosen; the same on every route."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Unit | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    ignore_eos: bool | None = None


class StreamOptions(Struct):
    """What a stream carries besides text."""

    include_usage: bool | None = None


class Reply(Sampling):
    """How long a reply may be, when it ends, how many there are and how they travel."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class Settings(Reply):
    """What a reply asked for in Python, not over HTTP, may set."""

    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class Unsupported(Reply):
    """Fields that change what the output means and that this server cannot honour: refused unless
    null or empty.

    Ignoring one of them would answer a different question than the one asked.
    """

    grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    response_format: Any = None
    """Allowed in its plain form, {"type": "text"}."""


class ContentPart(Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Struct):
    """The call a model made earlier. `arguments` is JSON in a string, by some clients an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Struct):
    """One call in the history."""

    function: CalledFunction
    id: str | None = None
    type: str | None = None


class Message(Struct):
    """One message of a chat. Which roles there are is checked in `messages.py`."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ToolFunction(Struct):
    """What the model may call."""

    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    """One entry of `tools`."""

    type: str
    function: ToolFunction | None = None


class ChatRequest(Unsupported, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Wins over max_tokens, its older name."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Unsupported):
    """POST /v1/completions."""

    prompt: Any = None
    """A string, token ids, a list of either, or null. Checked in `openai_completions.py`: a union
    of lists has no type.
    """
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None


chat_decoder = msgspec.json.Decoder(ChatRequest)
completion_decoder = msgspec.json.Decoder(CompletionRequest)
