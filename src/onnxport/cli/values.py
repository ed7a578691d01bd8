"""What the text after an option means: counts, ports, times, sizes, lists and files."""

from __future__ import annotations

import argparse
import json
import math
import re
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

from onnxport.errors import RequestError
from onnxport.graphs.embedding_spec import Dimensions

BIAS = re.compile(r"(\d+)([+-]\d+(?:\.\d+)?)")
SIZE = re.compile(r"(\d+(?:\.\d+)?) *(?:([KMGT])(i?B?)|B)?", re.IGNORECASE)


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, such as 8192") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def port(text: str) -> int:
    """Parse a TCP port; 0 lets the system choose."""
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and 65535")
    return value


def seconds(text: str) -> float:
    """Parse a time of more than 0 seconds."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def size(text: str) -> int:
    """Parse a number of bytes, alone or with a unit as GNU's tools take it.

    1G, 1Gi and 1GiB are 2**30 bytes, 1GB is 10**9; likewise K, M and T. A number with a unit may
    have a fraction.
    """
    found = SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; give bytes, or a unit as in 512MiB, 8GiB, 2G or 1.5GB"
        )
    number, letter, rest = found.groups()
    if letter is None and "." in number:
        raise argparse.ArgumentTypeError(f"{text!r} is a part of a byte; add a unit, as in 1.5GiB")
    base = 1000 if (rest or "").upper() == "B" else 1024
    power = " KMGT".index((letter or " ").upper())
    return int(Decimal(number) * Decimal(base) ** power)


def memory(text: str) -> int | float:
    """Parse a size in bytes, or a share of the free memory such as 60% or 0.6."""
    share = re.fullmatch(r"(\d+(?:\.\d+)?) *%|(\d*\.\d+)", text.strip())
    if share is None:
        if num_bytes := size(text):
            return num_bytes
        raise argparse.ArgumentTypeError("0 bytes are no memory; leave it out for the default")
    value = float(share[1]) / 100 if share[1] else float(share[2])
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no share of the free memory; give more than 0% and at most 100%, or a "
            "size such as 8GiB"
        )
    return value


def logit_bias(text: str) -> tuple[int, float]:
    """Parse a token and what is added to its logit, as llama.cpp's tools take them: 42-1.5."""
    found = BIAS.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no bias; give a token id and what is added to its logit, with its sign, "
            "as in 42-100 or 7+1.5"
        )
    return int(found[1]), float(found[2])


def json_object(text: str) -> dict[str, Any]:
    """Parse an object of JSON, which holds nothing that cannot be written as JSON again."""
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:  # of UnicodeEncodeError: half of a character
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no object of JSON; give names and values, as in '{{\"name\": 1}}'"
        )
    return found


def reasoning_parser(text: str) -> str:
    """Return the name of a reasoning parser."""
    from onnxport.serving.reasoning_formats import reasoning_format

    try:
        reasoning_format(text, ())
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def token_list(text: str) -> tuple[str, ...]:
    """Return tokens that are separated by commas."""
    found = tuple(text.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of tokens, such as no,yes")
    return found


def dimensions(text: str) -> Dimensions:
    """Return what vectors may be cut to."""
    if text == "any":
        return "any"
    with suppress(ValueError):
        found = tuple(int(part) for part in text.split(","))
        if min(found) > 0:
            return found
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither a list of numbers above 0, such as 256,512, nor any"
    )


def text_of(option: str, path: Path) -> str:
    """Return the text of a file; raises RequestError if it cannot be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{option} names {path}, which cannot be read: {error}") from error
