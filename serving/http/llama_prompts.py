"""Prompts and biases as llama.cpp's server takes them: texts and token ids in one list."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic_core import PydanticCustomError

from onnxport.errors import CapacityError, RequestError
from onnxport.serving.http.fields import are_ids
from onnxport.serving.http.generation_fields import MOST_BIASES
from onnxport.serving.http.prompts import text_of
from onnxport.serving.http.service import Service, Tokenizer
from onnxport.serving.param_ranges import MAX_BIAS

MOST_PROMPTS = 1 << 16  # of a list; fewer may wait
MOST_BIAS_TEXTS = 512  # whose tokens get a bias
MOST_BIAS_TEXT = 1024  # characters of one
MOST_BIAS_CHARS = 1 << 16  # of all of them
MOST_ID_DIGITS = 10
Mixed = list[int | str]
Biases = Sequence[tuple[int | str, float]]  # tokens, or texts of some, and what is added


class Prompted(NamedTuple):
    """A prompt as it is computed."""

    token_ids: list[int]
    text: str | None = None  # as it was given; None: it was not one text
    is_cut: bool = False  # whether a part of it was left out


def prompts(value: Any) -> list[str | Mixed]:
    """Return each prompt of a request: a text, or a list of token ids and texts.

    A list with a token id in it is one prompt; any other list is one of prompts. An object has a
    text, as llama.cpp has it where images go with it.

    Raises:
        PydanticCustomError: there are images, or sounds.
    """
    value = [text_of(one) for one in value] if isinstance(value, list) else text_of(value)
    if isinstance(value, list) and not (value and _is_one(value)):
        if not value or len(value) > MOST_PROMPTS or not all(map(_is_prompt, value)):
            raise _wrong()
        return value
    if not _is_prompt(value):
        raise _wrong()
    return [value]


def _is_one(value: list[Any]) -> bool:
    kinds = set(map(type, value))
    return int in kinds and list not in kinds


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str) or not isinstance(value, list):
        return isinstance(value, str)
    return set(map(type, value)) <= {int, str} and are_ids(
        [one for one in value if not isinstance(one, str)]
    )


def _wrong() -> PydanticCustomError:
    what = "a text, a list of token ids and texts, or a list of such prompts"
    return PydanticCustomError("union", "should be {what}", {"what": what})


def encoded(service: Service, given: Sequence[str | Mixed]) -> list[Prompted]:
    """Return the tokens of each prompt; the first text of one, if it is first, begins as texts do.

    Raises:
        RequestError: a prompt is empty.
        CapacityError: one has more tokens, or parts, than the context can have.
    """
    most = service.engine.capabilities.max_model_len
    found = []
    for prompt in given:
        parts = [prompt] if isinstance(prompt, str) else prompt
        token_ids = _joined(service.tokenizer, parts, most)
        if not token_ids:
            raise RequestError("prompt is empty; send a text, or token ids", "prompt")
        found.append(Prompted(token_ids, prompt if isinstance(prompt, str) else None))
    return found


def _joined(tokenizer: Tokenizer, parts: Sequence[int | str], most: int) -> list[int]:
    """Return the tokens of a prompt's parts; none is encoded behind those that do not fit."""
    if len(parts) > most:
        raise CapacityError(
            f"the prompt has {len(parts)} token ids and texts, and the context length is {most} "
            "tokens; shorten it"
        )
    token_ids: list[int] = []
    for place, part in enumerate(parts):
        if isinstance(part, str):
            tokenizer.check_length(part, most)
            token_ids += tokenizer.encode(part, add_special_tokens=place == 0)
        else:
            token_ids.append(part)
        if len(token_ids) > most:
            more = " at least" if place + 1 < len(parts) else ""
            raise CapacityError(
                f"the prompt has {len(token_ids)} tokens{more}, and the context length is {most} "
                "tokens; shorten it",
                len(token_ids),
                most,
            )
    return token_ids


def biases(value: Any) -> Biases | None:
    """Return llama.cpp's `logit_bias`: pairs, or an object, of tokens or texts and numbers.

    False is the bias of what must not come.

    Raises:
        RequestError: it is neither, names a token twice, or is too long, as its texts may be.
    """
    if value is None:
        return None
    if not isinstance(value, list | dict):
        raise _no_bias(value)
    if len(value) > MOST_BIASES:
        raise RequestError(
            f"logit_bias has {len(value)} tokens; it may have {MOST_BIASES}", "logit_bias"
        )
    pairs: list[Any] = value if isinstance(value, list) else []
    if isinstance(value, dict):
        pairs = [[_named(name), bias] for name, bias in value.items()]
    found: dict[int | str, float] = {}
    for one in pairs:
        match one:
            case [int() | str() as token, int() | float() as bias]:
                is_token = token != "" if isinstance(token, str) else type(token) is int
                in_range = -MAX_BIAS <= bias <= MAX_BIAS and bias is not True
                if is_token and token not in found and in_range:
                    found[token] = -math.inf if bias is False else bias
                    continue
        raise _no_bias(one)
    _check_texts([token for token in found if isinstance(token, str)])
    return tuple(found.items())


def _check_texts(texts: Sequence[str]) -> None:
    """Refuse more texts than should be encoded for one request."""
    lengths = [len(text) for text in texts]
    longest, total = max(lengths, default=0), sum(lengths)
    for what, count, most in (
        (f"{len(texts)} texts", len(texts), MOST_BIAS_TEXTS),
        (f"a text of {longest} characters", longest, MOST_BIAS_TEXT),
        (f"texts of {total} characters", total, MOST_BIAS_CHARS),
    ):
        if count > most:
            raise RequestError(
                f"logit_bias has {what}; it may have {MOST_BIAS_TEXTS} texts, of {MOST_BIAS_TEXT} "
                f"characters each and {MOST_BIAS_CHARS} in all; name other tokens by their ids, "
                "which /tokenize tells",
                "logit_bias",
            )


def _named(name: str) -> int | str:
    return int(name) if name.isdecimal() and len(name) <= MOST_ID_DIGITS else name


def _no_bias(one: Any) -> RequestError:
    return RequestError(
        f"logit_bias has {repr(one)[:80]}; give each token once, by its id or its text, with the "
        f"number that is added to its logit, {-MAX_BIAS:g} to {MAX_BIAS:g}, or false for one that "
        "must not come, as in [[42, -1.5], [7, false]]",
        "logit_bias",
    )


def by_id(given: Biases, tokenizer: Tokenizer) -> dict[int, float]:
    """Return what is added to each token; of a text all tokens get its bias.

    Those that several texts give a token add up, as far as a bias may go.

    Raises:
        RequestError: a text holds half of a character.
    """
    texts = [token for token, _ in given if isinstance(token, str)]
    encoded = iter(tokenizer.encode_all(texts, add_special_tokens=False))
    found: dict[int, float] = {}
    for token, bias in given:
        for token_id in [token] if isinstance(token, int) else next(encoded):
            total = found.get(token_id, 0.0) + bias
            found[token_id] = total if total == -math.inf else min(max(total, -MAX_BIAS), MAX_BIAS)
    return found
