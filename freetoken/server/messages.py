"""Chat messages and tools as the text layer takes them: plain dicts with what the model may see,
and nothing else.

Roles and parts are checked here, where the field can be named; `chat/` brings them into the
template's form.
"""

from __future__ import annotations

from typing import Any

from freetoken.errors import RequestError
from freetoken.server.schema import ChatRequest, ContentPart, Message, Tool, ToolCall

_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",  # the old name of the same role
}

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Return the messages for the template. Raises RequestError naming the message and the part."""
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def template_tools(request: ChatRequest) -> list[dict[str, Any]] | None:
    """Return the tools for the template, or None.

    Tools are rendered whatever tool_choice says, "none" too: the prompt's beginning then stays the
    same from turn to turn. A call comes back as the model's own text. What would force or forbid a
    call is refused.
    """
    _refuse_legacy(request)
    _check_choice(request)
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())]
    return tools or None


def template_kwargs(request: ChatRequest) -> dict[str, Any]:
    """Return extra template variables. The more explicit wins: chat_template_kwargs,
    enable_thinking, reasoning_effort.
    """
    kwargs: dict[str, Any] = {}
    effort = request.reasoning_effort
    if effort is not None:
        if effort not in _EFFORTS:
            raise RequestError(
                f"reasoning_effort: expected one of {', '.join(_EFFORTS)}, got {effort!r}",
                param="reasoning_effort",
            )
        kwargs["reasoning_effort"] = effort
        if effort in ("none", "minimal"):
            kwargs["enable_thinking"] = False
    if request.enable_thinking is not None:
        kwargs["enable_thinking"] = request.enable_thinking
    return kwargs | (request.chat_template_kwargs or {})


def check_modalities(request: ChatRequest) -> None:
    """Raise RequestError if anything but text is asked for."""
    other = [m for m in request.modalities or () if m != "text"]
    if other:
        raise RequestError(f'modalities: expected ["text"], got {other[0]!r}', param="modalities")


def _message(message: Message, where: str) -> dict[str, Any]:
    role = _ROLES.get(message.role)
    if role is None:
        raise RequestError(
            f"{where}.role: expected one of {', '.join(_ROLES)}, got {message.role!r}",
            param=f"{where}.role",
        )
    out: dict[str, Any] = {"role": role, "content": _content(message.content, f"{where}.content")}
    if message.name is not None:
        out["name"] = message.name
    if role == "tool" and message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if role == "assistant":
        reasoning = (
            message.reasoning_content
            if message.reasoning_content is not None
            else message.reasoning
        )
        if reasoning is not None:
            out["reasoning_content"] = reasoning
        if message.tool_calls:
            out["tool_calls"] = [_call(call) for call in message.tool_calls]
    return out


def _content(content: str | list[ContentPart] | None, where: str) -> str | list[dict[str, str]]:
    if isinstance(content, list):
        return [_part(part, f"{where}[{j}]") for j, part in enumerate(content)]
    return content or ""


def _part(part: ContentPart, where: str) -> dict[str, str]:
    if part.type not in ("text", "refusal"):
        raise RequestError(
            f"{where}: expected a part of type text or refusal, got {part.type!r};"
            " this model reads text only",
            param=where,
            code="unsupported_content",
        )
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise RequestError(
            f"{where}.{part.type}: expected text, got none", param=f"{where}.{part.type}"
        )
    return {"type": "text", "text": text}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    out: dict[str, Any] = {"type": "function", "function": function}
    if call.id is not None:
        out["id"] = call.id
    return out


def _tool(tool: Tool, where: str) -> dict[str, Any]:
    if tool.type != "function":
        raise RequestError(
            f"{where}.type: expected 'function', got {tool.type!r}", param=f"{where}.type"
        )
    function = tool.function
    if function is None:
        raise RequestError(
            f"{where}.function: expected an object, got none", param=f"{where}.function"
        )
    if function.strict:
        raise RequestError(
            f"{where}.function.strict: expected false or null, got true for {function.name!r};"
            " arguments cannot be held to a schema yet",
            param=f"{where}.function.strict",
            code="unsupported_parameter",
        )
    out: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        out["description"] = function.description
    out["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": out}


def _refuse_legacy(request: ChatRequest) -> None:
    for name, value in (("functions", request.functions), ("function_call", request.function_call)):
        if value and value not in ("none", "auto"):
            raise RequestError(
                f"{name}: expected the field's successor, tools, got the old form", param=name
            )


def _check_choice(request: ChatRequest) -> None:
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return
    shown = (
        choice
        if isinstance(choice, str)
        else choice.get("type", "an object")
        if choice
        else "an object"
    )
    raise RequestError(
        f"tool_choice: expected auto or none, got {shown!r}; a call cannot be forced yet",
        param="tool_choice",
        code="unsupported_parameter",
    )
