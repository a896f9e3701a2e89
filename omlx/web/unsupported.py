"""What no dialect does yet, refused by the name it has in each."""

from __future__ import annotations

from typing import Any

from omlx.web.body import unsupported


def refuse_tools(tools: list[Any] | None, choice: str | dict[str, Any] | None) -> None:
    """Tools that may not be called, and a choice between none, ask for nothing."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if tools and kind != "none":
        raise unsupported("tools are", "tools")
    if kind not in (None, "none", "auto"):
        raise unsupported("tool_choice needs tools, which are", "tool_choice")


def refuse_format(form: dict[str, Any] | None, field: str) -> None:
    """Of all formats only plain text is given."""
    kind = (form or {}).get("type", "text")
    if kind != "text":
        raise unsupported(f"{field} of type {str(kind)[:60]!r} is", field)
