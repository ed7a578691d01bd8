"""What a GGUF file says of its tokens, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.gguf import roles
from onnxport.exporter.gguf.roles import CONTROL, FILLING_KEYS, NAMED_ENDS, USER_DEFINED

PREFIX: Final = "tokenizer.ggml."
MODEL: Final = "tokenizer.ggml.model"
ADVICE: Final = (
    "Give the folder of the model's own tokenizer with --tokenizer (in Python: "
    "ExportOptions(tokenizer=...))."
)

NORMAL: Final = 1
UNKNOWN: Final = 2
UNUSED: Final = 5
BYTE: Final = 6
SPACE: Final = "\u2581"  # how SentencePiece spells a space

_KINDS: Final = ("gpt2", "llama", "gemma4")
_SPECIAL: Final = ("bos", *NAMED_ENDS, "unknown", "padding")
# Keys that change nothing here: tokens of tasks that are not asked for.
_IRRELEVANT: Final = frozenset(
    {
        *("mask_token_id", "seperator_token_id", "cls_token_id", "token_type_count"),
    }
)
# Keys that would change which tokens a text has, with the values at which they do nothing.
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "add_sep_token": (False,),
    "remove_extra_whitespaces": (False,),
    "precompiled_charsmap": ([], ""),
}
_READ: Final = frozenset(
    {
        *("model", "pre", "tokens", "token_type", "scores", "merges"),
        *("add_bos_token", "add_eos_token", "add_space_prefix", "suppress_tokens"),
        *(f"{name}_token_id" for name in (*_SPECIAL, *FILLING_KEYS)),
    }
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a file."""

    path: Path
    kind: str  # one of _KINDS
    pre: str | None
    tokens: tuple[str, ...]
    types: tuple[int, ...]  # of each
    scores: tuple[float, ...]  # of each, where `kind` is llama
    merges: tuple[str, ...]
    suppressed: tuple[int, ...]  # which are never to be written
    special: Mapping[str, int]  # bos, eos, eot, eom, unknown, padding
    filling: Mapping[str, int]  # keys of FILLING_KEYS
    adds_bos: bool | None  # None: the file does not say
    adds_eos: bool
    space_prefix: bool

    @classmethod
    def read(cls, values: Mapping[str, Any], path: Path) -> Vocabulary | None:
        """The tokens in the metadata `values` of the file `path`; None: it has none.

        Raises:
            CheckpointError: The values contradict each other.
            UnsupportedModelError: A kind of tokenizer, or a key, that is not known.
        """
        own = _own(values)
        kind = own.get("model", "none")
        if kind in ("none", "no_vocab"):
            return None
        if kind not in _KINDS:
            raise UnsupportedModelError(
                f"{path}: the tokenizer is {kind!r}; read are {', '.join(map(repr, _KINDS))}. "
                f"{ADVICE}"
            )
        _check_keys(own, path)
        tokens = tuple(_list(own, "tokens", str, path))
        types = tuple(_list(own, "token_type", int, path) or [NORMAL] * len(tokens))
        scores = tuple(_list(own, "scores", float, path)) if kind == "llama" else ()
        sizes = {len(tokens), len(types), *([len(scores)] if kind == "llama" else [])}
        if len(sizes) != 1 or not tokens:
            raise CheckpointError(
                f"{path} has {len(tokens)} tokens, {len(types)} of their types and {len(scores)} "
                f"scores, which must be as many. Download it again."
            )
        if not all(map(math.isfinite, scores)):
            raise CheckpointError(f"{path}: {PREFIX}scores are not all finite. {ADVICE}")
        if kind == "llama":
            own = _with_defaults(own, types)
            tokens = tuple(map(_as_in_texts, tokens, types))
        tokens = tuple(one or f"[EMPTY_{place}]" for place, one in enumerate(tokens))
        pre = own.get("pre")
        if not isinstance(pre, str | None):
            raise CheckpointError(f"{path}: {PREFIX}pre is {str(pre)[:80]}, and no name.")
        space_prefix = _flag(own, "add_space_prefix", path)
        return cls(
            path,
            kind,
            pre,
            tokens,
            types,
            scores,
            tuple(_list(own, "merges", str, path)),
            tuple(_list(own, "suppress_tokens", int, path)),
            _special(own, _SPECIAL, len(tokens), path),
            _special(own, FILLING_KEYS, len(tokens), path),
            _flag(own, "add_bos_token", path),
            bool(_flag(own, "add_eos_token", path)),
            space_prefix if space_prefix is not None else kind == "llama",
        )

    def ends(self) -> list[int]:
        """The tokens that end what the model says, its own end first."""
        return roles.ends({**self.special, **self.filling}, self.tokens, self.types)

    def fills_by(self) -> dict[str, str]:
        """The tokens to fill in by that the file names, as they are spelled: see `roles`."""
        return roles.filling(self.filling, self.tokens)

    def text(self, name: str) -> str | None:
        """A special token as it is spelled; None: there is none."""
        return self.tokens[self.special[name]] if name in self.special else None


def read_ends(values: Mapping[str, Any], path: Path, vocab_size: int) -> list[int]:
    """What `Vocabulary.ends` tells, also of a file whose tokenizer is not read.

    Args:
        values: All metadata.
        path: The file, for errors.
        vocab_size: Tokens that the model can write.

    Raises:
        CheckpointError: An id is none of them.
    """
    own = _own(values)
    special = _special(own, (*NAMED_ENDS, *FILLING_KEYS), vocab_size, path)
    tokens, types = own.get("tokens"), own.get("token_type")
    if not isinstance(tokens, list) or not isinstance(types, list) or len(tokens) != len(types):
        tokens = types = []
    return roles.ends(special, tokens[:vocab_size], types[:vocab_size])


def check_count(values: Mapping[str, Any], path: Path, vocab_size: int) -> None:
    """Refuse more tokens in the metadata `values` of the file `path` than the model has rows for.

    Fewer are allowed: rows behind the last token are padding.

    Raises CheckpointError.
    """
    tokens = values.get(f"{PREFIX}tokens")
    if isinstance(tokens, list) and len(tokens) > vocab_size:
        raise CheckpointError(
            f"{path} has {len(tokens)} tokens, and the model's embedding {vocab_size} rows: they "
            f"are another model's. {ADVICE}"
        )


def _own(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the tokenizer, without what they all begin with."""
    found = {key: value for key, value in values.items() if key.startswith(PREFIX)}
    return {key.removeprefix(PREFIX): value for key, value in found.items()}


def _special(
    own: Mapping[str, Any], names: Sequence[str], count: int, path: Path
) -> dict[str, int]:
    """The ids of special tokens, each of them one of `count`."""
    special: dict[str, int] = {}
    for name in names:
        found = own.get(f"{name}_token_id")
        if found is None:
            continue
        if type(found) is not int or not 0 <= found < count:
            raise CheckpointError(
                f"{path}: {PREFIX}{name}_token_id is {found!r}, of {count} tokens."
            )
        special[name] = found
    return special


def _with_defaults(own: Mapping[str, Any], types: Sequence[int]) -> dict[str, Any]:
    """The keys with SentencePiece's own ids of tokens, where older files do not tell others."""
    defaults = {"bos_token_id": 1, "eos_token_id": 2}
    there = {
        key: place for key, place in defaults.items() if types[place : place + 1] == (CONTROL,)
    }
    return there | dict(own)


def _as_in_texts(token: str, kind: int) -> str:
    """A token as texts have it: of runs of spaces, which Gemma has, there are two spellings."""
    is_run = kind == USER_DEFINED and len(token) > 1 and not token.strip(SPACE)
    return " " * len(token) if is_run else token


def _check_keys(own: Mapping[str, Any], path: Path) -> None:
    unknown = {
        key: value
        for key, value in own.items()
        if key not in _READ | _IRRELEVANT and value not in _NEUTRAL.get(key, ())
    }
    if unknown:
        listed = ", ".join(f"{PREFIX}{key} = {str(one)[:80]}" for key, one in unknown.items())
        raise UnsupportedModelError(
            f"{path} has {len(unknown)} key(s) of its tokenizer that are not understood, and that "
            f"could change which tokens a text has: {listed}. {ADVICE}"
        )


def _flag(own: Mapping[str, Any], key: str, path: Path) -> bool | None:
    """What a key says; None: it is not there. Raises CheckpointError if it is of another type."""
    found = own.get(key)
    if not isinstance(found, bool | None):
        raise CheckpointError(
            f"{path}: {PREFIX}{key} is {str(found)[:80]!r}, expected true or false. {ADVICE}"
        )
    return found


def _list(own: Mapping[str, Any], key: str, kind: type, path: Path) -> list[Any]:
    found = own.get(key, [])
    if not isinstance(found, list) or not all(type(one) is kind for one in found):
        raise CheckpointError(
            f"{path}: {PREFIX}{key} is no list of values of type {kind.__name__}."
        )
    return found
