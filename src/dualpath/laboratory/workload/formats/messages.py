"""Converts OpenAI chat messages to a role and a text."""

from typing import Any

import msgspec

from dualpath.laboratory.workload.conversation.text_session import Message


class RawMessage(msgspec.Struct):
    """A message as recorded; other fields are ignored."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Any] | None = None


def flatten(raw: RawMessage, tools: list[Any] | None = None) -> Message:
    """Return role and text, followed by tool schemas (if given) and tool calls as lines of JSON."""
    if isinstance(raw.content, list):
        parts = [str(part.get("text", "")) for part in raw.content]
    else:
        parts = [raw.content or ""]
    for extra in (tools, raw.tool_calls):
        if extra:
            parts.append(msgspec.json.encode(extra, order="sorted").decode())
    return Message(raw.role, "\n".join(part for part in parts if part))
