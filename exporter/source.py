"""The small files beside the weights: tokenizer, generation settings, special tokens."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from onnxport.errors import CheckpointError

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
logger = logging.getLogger(__name__)

END: Final = "eos_token_id"
TEMPLATE_FOLDER: Final = "additional_chat_templates"  # named templates, one `.jinja` file each
PAIRS: Final = "rerank"  # the name of that which writes a query and a document


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The token ids that generation needs."""

    eos: tuple[int, ...]  # any of them ends a sequence
    bos: int | None
    pad: int | None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or {} where the file is absent. Raises CheckpointError if it is not one."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    return value


def check_tokenizer(folder: Path) -> None:
    """Refuse files of a tokenizer that nobody could read, before the weights are converted.

    Raises:
        CheckpointError: names the file.
    """
    for name in TOKENIZER_FILES:
        if name.endswith(".json"):
            read_json(folder / name)
    path = folder / TOKENIZER_FILES[0]
    if not path.is_file():
        return
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{path} is not a tokenizer that can be read: {error}. It may not have been downloaded "
            "to its end."
        ) from error


def check_fits(folder: Path, vocab_size: int) -> None:
    """Refuse the folder of a tokenizer that is not there, or is another model's.

    Added tokens may lie behind the last row of the embedding, and a warning tells of them: Gemma
    3's folders have one for images, and its models of text alone no row for it.

    Raises:
        CheckpointError: says what was found.
    """
    path = folder / TOKENIZER_FILES[0]
    if not path.is_file():
        raise CheckpointError(
            f"{folder}, which was named as the tokenizer's folder, holds no {TOKENIZER_FILES[0]}. "
            "Give a folder with one, such as that of the original checkpoint."
        )
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(str(path))
    largest = max(found.get_vocab(with_added_tokens=False).values(), default=0)
    if largest >= vocab_size:
        raise CheckpointError(
            f"{path} has the token {largest}, and the model has {vocab_size}, counted from 0: it "
            "is another model's tokenizer."
        )
    beyond = {number: text for text, number in found.get_vocab().items() if number >= vocab_size}
    if beyond:
        logger.warning(
            "%s has %d added tokens, such as %r (%d), behind the last of the model's %d: it cannot "
            "read texts that have them",
            *(path, len(beyond), beyond[min(beyond)], min(beyond), vocab_size),
        )


def named_ids(folder: Path, key: str) -> tuple[int, ...]:
    """The token ids that a folder names; `generation_config.json` goes before `config.json`.

    That is transformers' order. The last to be asked is the `text_config` of a model that reads
    images, too.

    Raises CheckpointError for an id that is not an integer.
    """
    sources = [read_json(folder / name) for name in ("generation_config.json", "config.json")]
    if isinstance(text := sources[-1].get("text_config"), dict):
        sources.append(text)
    for values in sources:
        found = values.get(key)
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise CheckpointError(f"{folder}: {key} is {found!r}, expected token ids.")
        known = tuple(i for i in ids if i >= 0)  # Llama 1 wrote -1 for "none"
        if known:
            return known
    return ()


def special_tokens(
    folder: Path, vocab_size: int, further_ends: tuple[int, ...] = ()
) -> SpecialTokens:
    """The special token ids that a folder names; see `named_ids`.

    The tokenizer's own end token is one besides those, as in vLLM and llama.cpp: who trains a chat
    model from a base may have changed that alone. `further_ends` are some that it does not name.

    Raises CheckpointError for an id that is not an integer.
    """
    ends = (*named_ids(folder, END), *further_ends)
    own = _end_of_tokenizer(folder)
    if own is not None and own not in ends and own < vocab_size:  # which the model can write
        logger.info("token %d ends texts, too, as the tokenizer says", own)
        ends = (*ends, own)
    return SpecialTokens(
        ends,
        next(iter(named_ids(folder, "bos_token_id")), None),
        next(iter(named_ids(folder, "pad_token_id")), None),
    )


def _end_of_tokenizer(folder: Path) -> int | None:
    """The token that the tokenizer's files call the end; None where it knows none of that name."""
    config = read_json(folder / "tokenizer_config.json")
    others = read_json(folder / "special_tokens_map.json")
    named = config.get("eos_token") or others.get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    if not isinstance(text, str):
        return None
    added = config.get("added_tokens_decoder")
    for number, token in (added if isinstance(added, dict) else {}).items():
        if isinstance(token, dict) and token.get("content") == text and number.isdecimal():
            return int(number)
    path = folder / TOKENIZER_FILES[0]
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    found: int | None = Tokenizer.from_file(str(path)).token_to_id(text)
    return found
