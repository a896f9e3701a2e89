"""Whether a value is what a JSON schema asks for: the keywords that strict tools are made of.

``pattern`` and ``format`` are not looked at: an expression of a client's could take for ever.
Source of the rest: JSON Schema 2020-12, https://json-schema.org/draft/2020-12.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

DEPTH_MAX = 64
"""Of a value; references may go round for ever without one getting deeper."""

_TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: _is_number(value) and value == int(value),
    "number": lambda value: _is_number(value),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}

_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, bound: not _is_number(value) or value >= bound,
    "maximum": lambda value, bound: not _is_number(value) or value <= bound,
    "exclusiveMinimum": lambda value, bound: not _is_number(value) or value > bound,
    "exclusiveMaximum": lambda value, bound: not _is_number(value) or value < bound,
    "minLength": lambda value, bound: not isinstance(value, str) or len(value) >= bound,
    "maxLength": lambda value, bound: not isinstance(value, str) or len(value) <= bound,
    "minItems": lambda value, bound: not isinstance(value, list) or len(value) >= bound,
    "maxItems": lambda value, bound: not isinstance(value, list) or len(value) <= bound,
}


def fits(value: Any, schema: Any, root: Any = None, depth: int = 0) -> bool:
    """``root``: what references of the schema begin at; the schema itself if not given.

    Raises what it meets in a schema that is none.
    """
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    if depth > DEPTH_MAX:
        return False

    def all_fit(values: Any, wanted: Any) -> bool:
        return all(fits(one, wanted, root, depth + 1) for one in values)

    if "$ref" in schema and not fits(value, _referred(schema["$ref"], root), root, depth + 1):
        return False
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_TYPES[kind](value) for kind in kinds):
        return False
    if "enum" in schema and not any(_same(value, one) for one in schema["enum"]):
        return False
    if "const" in schema and not _same(value, schema["const"]):
        return False
    if not all(holds(value, schema[name]) for name, holds in _BOUNDS.items() if name in schema):
        return False
    for name in ("anyOf", "oneOf"):
        if name in schema and not any(all_fit([value], one) for one in schema[name]):
            return False
    if not all(all_fit([value], one) for one in schema.get("allOf", ())):
        return False
    if isinstance(value, list):
        return all_fit(value, schema.get("items", True))
    if isinstance(value, dict):
        known = schema.get("properties", {})
        others = [one for name, one in value.items() if name not in known]
        return (
            set(schema.get("required", ())) <= value.keys()
            and all(all_fit([value[name]], known[name]) for name in known if name in value)
            and all_fit(others, schema.get("additionalProperties", True))
        )
    return True


def _referred(reference: str, root: Any) -> Any:
    """What ``#/$defs/name`` and the like mean."""
    found = root
    for part in reference.removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        found = found[int(part)] if isinstance(found, list) else found[part]
    return found


def _same(one: Any, other: Any) -> bool:
    """In JSON true is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
