"""A JSON schema as a request gives it, made ready: rewritten, checked, and closed where asked."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onnxport.errors import RequestError
from onnxport.serving.structured.closing import close
from onnxport.serving.structured.exclusive import led_to, let_any_of
from onnxport.serving.structured.generators import rewritten
from onnxport.serving.structured.schema import ROOT_ONLY, check_schema
from onnxport.serving.structured.untyped import with_types

logger = logging.getLogger(__name__)

MOST_TOLD = 5  # keywords in a line of the log


@dataclass(frozen=True, slots=True)
class Prepared:
    """A schema that is enforced in every word.

    Attributes:
        schema: an object of its own.
        left_out: JSON pointers to the keywords that were left out; `tell` tells of them.
    """

    schema: Any
    left_out: tuple[str, ...] = ()


def prepared(
    schema: Any,
    param: str,
    *,
    strict: bool | None = None,
    is_closed: bool = False,
    closes: bool = False,
) -> Prepared:
    """Return a schema that is enforced in every word.

    Args:
        schema: as JSON is read; it stays as it is.
        param: the request's field that errors name.
        strict: as OpenAI has it. False: keywords that cannot be enforced are left out. True: they
            are refused, and objects that say nothing of further properties have none, where that
            can be. None: they are refused.
        is_closed: whether such objects have none, or are refused.
        closes: whether they have none where that can be, though keywords may be left out.

    Raises:
        RequestError: says where, what was found and what is supported.
    """
    try:
        result, narrowed = rewritten(schema)
        left_out = check_schema(result, strict=strict is not False)
        if is_closed or narrowed or strict is not None:
            left_out += let_any_of(result, always=strict is False)
        _check_narrowed(result, narrowed)
        with_types(result)
        if is_closed or strict or closes:
            close(result, always=is_closed)
    except ValueError as error:
        raise RequestError(f"the JSON schema cannot be enforced: {error}", param) from error
    except RecursionError as error:  # of a constant
        raise RequestError(
            "the JSON schema cannot be enforced: a value in it is nested too deep; flatten it",
            param,
        ) from error
    if isinstance(result, dict):
        result = {name: each for name, each in result.items() if name not in ROOT_ONLY}
    return Prepared(result, left_out)


def _check_narrowed(schema: Any, narrowed: Sequence[Any]) -> None:
    """Refuse a schema where what an alternative of `oneOf` does not fit any more fits others."""
    left = {id(one) for one in narrowed}
    if left and any(id(one) in left for one in led_to(schema)):
        raise ValueError(
            "oneOf has a number or its text with a pattern that looks around, and alternatives "
            "that are not visibly exclusive; write anyOf"
        )


def tell(param: str, left_out: Sequence[str]) -> None:
    """Tell the log what of a request is not enforced, if anything.

    Args:
        param: the request's field.
        left_out: where in it; names in it are the client's.
    """
    if not left_out:
        return
    told = ", ".join(repr(each[-120:]) for each in left_out[:MOST_TOLD])
    more = len(left_out) - MOST_TOLD
    logger.info(
        "%s is enforced but for %s%s, which cannot be; with strict set to true it may be refused",
        param,
        told,
        f" and {more} more" if more > 0 else "",
    )
