"""What a GGUF file says of its tokens, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError

PREFIX: Final = "tokenizer.ggml."
MODEL: Final = "tokenizer.ggml.model"
ADVICE: Final = (
    "Give the folder of the model's own tokenizer with --tokenizer (in Python: "
    "ExportOptions(tokenizer=...))."
)

NORMAL: Final = 1
UNKNOWN: Final = 2
CONTROL: Final = 3
USER_DEFINED: Final = 4
UNUSED: Final = 5
BYTE: Final = 6
SPACE: Final = "\u2581"  # how SentencePiece spells a space

_SPECIAL: Final = ("bos", "eos", "eot", "eom", "unknown", "padding")
# Keys that change nothing here: tokens of tasks that are not asked for.
_IRRELEVANT: Final = frozenset(
    {
        *(f"fim_{part}_token_id" for part in ("pre", "suf", "mid", "pad", "rep", "sep")),
        *("prefix_token_id", "suffix_token_id", "middle_token_id"),
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
        *("add_bos_token", "add_eos_token", "add_space_prefix"),
        *(f"{name}_token_id" for name in _SPECIAL),
    }
)
# Tokens that end what a model says, whatever else a file calls its end, and whatever it calls them;
# llama.cpp has these and more.
_ENDS: Final = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>"),
        *("<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "</s>"),
    }
)
_HARMONY: Final = frozenset({"<|return|>", "<|call|>", "<|end|>"})  # the last one ends no text


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a file."""

    path: Path
    kind: str  # gpt2 or llama
    pre: str | None
    tokens: tuple[str, ...]
    types: tuple[int, ...]  # of each
    scores: tuple[float, ...]  # of each, where `kind` is llama
    merges: tuple[str, ...]
    special: Mapping[str, int]  # bos, eos, eot, eom, unknown, padding
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
        own = {
            key.removeprefix(PREFIX): value
            for key, value in values.items()
            if key.startswith(PREFIX)
        }
        kind = own.get("model", "none")
        if kind in ("none", "no_vocab"):
            return None
        if kind not in ("gpt2", "llama"):
            raise UnsupportedModelError(
                f"{path}: the tokenizer is {kind!r}; read are 'gpt2' and 'llama'. {ADVICE}"
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
        if kind == "llama":
            tokens = tuple(map(_as_in_texts, tokens, types))
        special = {}
        for name in _SPECIAL:
            found = own.get(f"{name}_token_id")
            if found is None:
                continue
            if type(found) is not int or not 0 <= found < len(tokens):
                raise CheckpointError(
                    f"{path}: {PREFIX}{name}_token_id is {found!r}, of {len(tokens)} tokens."
                )
            special[name] = found
        pre = own.get("pre")
        if not isinstance(pre, str | None):
            raise CheckpointError(f"{path}: {PREFIX}pre is {str(pre)[:80]}, and no name.")
        adds_bos = own.get("add_bos_token")
        return cls(
            path,
            kind,
            pre,
            tokens,
            types,
            scores,
            tuple(_list(own, "merges", str, path)),
            special,
            None if adds_bos is None else bool(adds_bos),
            bool(own.get("add_eos_token", False)),
            bool(own.get("add_space_prefix", kind == "llama")),
        )

    def ends(self) -> list[int]:
        """The tokens that end what the model says, its own end first."""
        named = [self.special[name] for name in ("eos", "eot", "eom") if name in self.special]
        known = {
            token: place
            for place, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (CONTROL, USER_DEFINED) and token in _ENDS
        }
        if known.keys() >= _HARMONY:
            del known["<|end|>"]
        return list(dict.fromkeys([*named, *known.values()]))

    def text(self, name: str) -> str | None:
        """A special token as it is spelled; None: there is none."""
        return self.tokens[self.special[name]] if name in self.special else None


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


def _list(own: Mapping[str, Any], key: str, kind: type, path: Path) -> list[Any]:
    found = own.get(key, [])
    if not isinstance(found, list) or not all(type(one) is kind for one in found):
        raise CheckpointError(
            f"{path}: {PREFIX}{key} is no list of values of type {kind.__name__}."
        )
    return found
