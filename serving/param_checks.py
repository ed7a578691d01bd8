"""Values of decoding parameters: texts, token ids and numbers, checked."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from onnxport.errors import RequestError

MAX_STOP_LENGTH = 1024  # characters; each end of a text is compared with the beginnings of all
_KINDS = {
    "stop": "every stop string",
    "bad_words": "every bad word",
    "dry_sequence_breakers": "every breaker",
}


def texts_of(name: str, given: Any) -> tuple[str, ...]:
    """Return texts as a tuple; a client may give one, a list or None.

    Raises:
        RequestError: one is empty, or is no text.
    """
    if given is not None and not isinstance(given, Iterable):
        raise RequestError(f"{name} is {given!r}; give a list of texts", name)
    texts = (given,) if isinstance(given, str) else tuple(given or ())
    if any(not isinstance(text, str) or not text for text in texts):
        kind = _KINDS[name]
        raise RequestError(f"{name} is {given!r}; {kind} must be text, not empty", name)
    if name == "stop" and (longest := max(map(len, texts), default=0)) > MAX_STOP_LENGTH:
        raise RequestError(
            f"stop holds a text of {longest} characters, at most {MAX_STOP_LENGTH} are supported; "
            "use a part of it",
            name,
        )
    return texts


def ids_of(name: str, given: Any) -> tuple[int, ...]:
    """Return token ids as a tuple.

    Raises:
        RequestError: they are no list, or one is no token id.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise RequestError(f"{name} is {given!r}; give a list of token ids", name)
    token_ids = tuple(given)
    # All at once, for there may be as many as the vocabulary has, and this is done several times.
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0:
        return token_ids
    for token_id in token_ids:
        check_token(name, token_id)
    return token_ids


def check_type(name: str, value: Any, kind: type) -> None:
    """Raise RequestError unless `value` is None or of this type."""
    if value is not None and not isinstance(value, kind):
        raise RequestError(f"{name} is {repr(value)[:80]}; give a {kind.__name__}", name)


def check_token(name: str, token_id: int) -> None:
    """Raise RequestError unless `token_id` can be a token."""
    if not isinstance(token_id, int) or isinstance(token_id, bool):
        raise RequestError(f"{name} holds {token_id!r}; token ids are integers", name)
    check_integer(name, token_id, 0, math.inf)


def check_number(
    name: str, value: float, low: float, high: float, *, open_low: bool = False
) -> None:
    """Raise RequestError unless low <= value <= high (low < value if `open_low`)."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not is_number:
        raise RequestError(f"{name} is {value!r}; it must be a Python number", name)
    if not is_number or not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} is {value!r}; it must be in {bracket}{low}, {high}]", name)


def check_integer(name: str, value: int | None, low: float, high: float) -> None:
    """Raise RequestError unless `value` is None or an integer, low <= value <= high."""
    if value is None:
        return
    if not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}; it must be an integer", name)
    check_number(name, value, low, high)
