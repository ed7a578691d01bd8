"""How texts are cut before byte pairs are merged, by the names that `tokenizer.ggml.pre` has.

Names: llama.cpp's `src/llama-vocab.cpp`. Expressions are those of the models' own `tokenizer.json`,
which llama.cpp's follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SIGNS_AND_SLASHES: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD: Final = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_CAPITALS: Final = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_THREE_DIGITS: Final = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_ONE_DIGIT: Final = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}|{_SIGNS}|{_SPACES}"
_O200K: Final = "|".join(
    (_WORD + _ENDINGS + "?", _CAPITALS + _ENDINGS + "?", r"\p{N}{1,3}", _SIGNS_AND_SLASHES, _SPACES)
)
_TEKKEN: Final = "|".join((_WORD, _CAPITALS, r"\p{N}", _SIGNS_AND_SLASHES, _SPACES))


@dataclass(frozen=True, slots=True)
class Split:
    """How a text becomes words."""

    pattern: str | None = None  # of words; None: GPT-2's
    single_digits: bool = False  # each digit is a word, ahead of GPT-2's pattern
    whole_words: bool = False  # a word that is a token is not made by merges
    composed: bool = False  # texts are brought to NFC first
    begins: bool = False  # a token begins texts, where the file does not say

    def pre_tokenizer(self) -> dict[str, Any]:
        """What `tokenizer.json` has for it."""
        level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": self.pattern is None,
        }
        first: list[dict[str, Any]] = []
        if self.pattern is not None:
            split = {"pattern": {"Regex": self.pattern}, "behavior": "Isolated", "invert": False}
            first.append({"type": "Split"} | split)
        if self.single_digits:
            first.append({"type": "Digits", "individual_digits": True})
        return {"type": "Sequence", "pretokenizers": [*first, level]}


_GPT2: Final = Split()
_LLAMA3: Final = Split(_THREE_DIGITS, whole_words=True, begins=True)
_QWEN2: Final = Split(_ONE_DIGIT, composed=True)
_DBRX: Final = Split(_THREE_DIGITS)
_SINGLE_DIGITS: Final = Split(single_digits=True)

SPLITS: Final[Mapping[str, Split]] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": Split(composed=True),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": _DBRX,
    "smaug-bpe": _DBRX,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "refact": _SINGLE_DIGITS,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "gpt-4o": Split(_O200K),
    "tekken": Split(_TEKKEN, whole_words=True, begins=True),
}
