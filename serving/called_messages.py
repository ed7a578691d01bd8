"""Calls of earlier messages as LFM2 writes them, for its chat templates, which speak of none.

They give a message's text alone, so the model would not see what it called. Source: the models'
cards, where a call stands ahead of the text of a message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from onnxport.serving.text import with_halves_escaped

START: Final = "<|tool_call_start|>"
END: Final = "<|tool_call_end|>"
SIGNS: Final = (START, "<|tool_list_start|>", "List of tools: [")  # of LFM2's templates


def is_lfm2(template: str) -> bool:
    """Whether a chat template is LFM2's."""
    return any(sign in template for sign in SIGNS)


def lacks_calls(template: str) -> bool:
    """Whether a chat template is LFM2's and does not write calls of earlier messages itself."""
    return is_lfm2(template) and "tool_calls" not in template


def with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose calls are in its text, ahead of what it says.

    Args:
        message: Its calls have arguments as objects.
    """
    functions = [call["function"] for call in message["tool_calls"]]
    write = _call if all(map(_is_pythonic, functions)) else _json
    text = f"{START}[{', '.join(map(write, functions))}]{END}{message.get('content') or ''}"
    return {key: one for key, one in message.items() if key != "tool_calls"} | {"content": text}


def _is_pythonic(function: Mapping[str, Any]) -> bool:
    """Whether Python can name a function and its arguments; others are called in JSON."""
    return all(name.isidentifier() for name in (function["name"], *function["arguments"]))


def _call(function: Mapping[str, Any]) -> str:
    told = (f"{key}={_literal(value)}" for key, value in function["arguments"].items())
    return f"{function['name']}({', '.join(told)})"


def _json(function: Mapping[str, Any]) -> str:
    return _text({key: function[key] for key in ("name", "arguments")})


def _literal(value: Any) -> str:
    """Return a value of JSON as Python has it, texts in double quotes."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, Mapping):
        pairs = (f"{_literal(key)}: {_literal(one)}" for key, one in value.items())
        return f"{{{', '.join(pairs)}}}"
    return _text(value)


def _text(value: Any) -> str:
    return with_halves_escaped(json.dumps(value, ensure_ascii=False))
