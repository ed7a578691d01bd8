"""Loads: what is asked and when. The same seed gives the same load anywhere."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxport.errors import RequestError
from onnxport.serving.text import HALF, is_whole

SEEDS = 2**64  # of NumPy's generators, which take no negative ones

LOWEST_ID = 3  # below are usually special tokens
KEYS = {"prompt", "max_tokens"}


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens, uniform from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read `128` or `32:512`.

        Raises:
            ValueError: it is neither, or the range is empty.
        """
        found = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
        low = int(found[1]) if found else 0
        high = int(found[2] or found[1]) if found else 0
        if not 1 <= low <= high:
            raise ValueError(f"{text!r} is no length; give tokens as 128, or a range as 32:512")
        return cls(low, high)

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        """Draw `count` lengths."""
        lengths: list[int] = random.integers(self.low, self.high + 1, count).tolist()
        return lengths


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a load."""

    prompt: str | tuple[int, ...]  # text or token ids
    max_tokens: int


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    """Prompts of random tokens; what they say does not matter to speed.

    Attributes:
        input_len: tokens of a prompt, beside those that all share.
        output_len: tokens of an answer.
        prefix_len: tokens that all prompts begin with.
        highest_id: ids are from LOWEST_ID to here, or from 0 where that is lower.
    """

    input_len: Lengths
    output_len: Lengths
    prefix_len: int = 0
    highest_id: int = 255

    def draw(self, count: int, seed: int) -> list[Ask]:
        """Draw `count` requests."""
        random = np.random.default_rng(seed % SEEDS)
        inputs = self.input_len.draw(random, count)
        outputs = self.output_len.draw(random, count)
        low = min(LOWEST_ID, self.highest_id)
        ids = random.integers(low, self.highest_id + 1, self.prefix_len + sum(inputs)).tolist()
        prefix, at = tuple(ids[: self.prefix_len]), self.prefix_len
        asks = []
        for own, max_tokens in zip(inputs, outputs, strict=True):
            asks.append(Ask(prefix + tuple(ids[at : at + own]), max_tokens))
            at += own
        return asks


def read_dataset(path: Path, output_len: Lengths, count: int | None, seed: int) -> list[Ask]:
    """Read requests from JSON lines: `{"prompt": text or token ids, "max_tokens": number}`.

    Args:
        path: the file.
        output_len: where a line says no `max_tokens`.
        count: how many, from the first line on, and again from there if there are fewer; None:
            every line once.
        seed: of `output_len`.

    Raises:
        RequestError: the file cannot be read or is empty, or a line is something else.
    """
    try:
        lines = path.read_text("utf-8").split("\n")  # not at U+2028 and such, which JSON may hold
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"{path} cannot be read as a dataset: {error}; give a file of JSON lines"
        ) from error
    parsed = [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not parsed:
        raise RequestError(f"{path} is empty; a dataset has a JSON object in each line")
    number = len(parsed) if count is None else count
    drawn = output_len.draw(np.random.default_rng(seed % SEEDS), number)
    chosen = [parsed[index % len(parsed)] for index in range(number)]
    return [
        Ask(prompt, length if max_tokens is None else max_tokens)
        for (prompt, max_tokens), length in zip(chosen, drawn, strict=True)
    ]


def arrivals(count: int, rate_per_s: float, seed: int) -> list[float]:
    """When requests arrive, in seconds from 0 on, whatever becomes of those before.

    A Poisson process: gaps are exponential with a mean of 1 / `rate_per_s`, and the first request
    arrives at 0. An infinite rate sends all at once.
    """
    if math.isinf(rate_per_s):
        return [0.0] * count
    # The seed has a stream of its own, so that the rate does not change the prompts.
    random = np.random.default_rng([seed % SEEDS, 1])
    gaps = random.exponential(1 / rate_per_s, max(count - 1, 0))
    times: list[float] = [0.0, *np.cumsum(gaps).tolist()]
    return times[:count]


def words(token_ids: Sequence[int]) -> str:
    """Text of about as many tokens: letters apart, which most tokenizers take for a token each."""
    return " ".join(_letters(token_ids))


def _letters(token_ids: Sequence[int]) -> Iterator[str]:
    for token_id in token_ids:
        yield chr(ord("a") + token_id % 26)


def _parse(path: Path, number: int, line: str) -> tuple[str | tuple[int, ...], int | None]:
    """Return prompt and max_tokens of one line."""
    try:
        found: Any = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise RequestError(f"line {number} of {path} is not JSON: {error}") from error
    if not isinstance(found, dict) or "prompt" not in found or found.keys() - KEYS:
        raise RequestError(
            f"line {number} of {path} is {line[:60]!r}; it must be an object with prompt and, if "
            "wanted, max_tokens, and nothing else"
        )
    prompt, max_tokens = found["prompt"], found.get("max_tokens")
    if isinstance(prompt, list) and all(type(one) is int and one >= 0 for one in prompt):
        prompt = tuple(prompt)
    if not isinstance(prompt, str | tuple) or not prompt:
        raise RequestError(
            f"prompt in line {number} of {path} must be text or a list of token ids, not empty"
        )
    if isinstance(prompt, str) and not is_whole(prompt):
        raise RequestError(f"prompt in line {number} of {path} {HALF}")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise RequestError(
            f"max_tokens in line {number} of {path} is {max_tokens!r}; it must be a whole number "
            "of at least 1, or be left out"
        )
    return prompt, max_tokens
