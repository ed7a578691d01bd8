"""How texts are cut before byte pairs are merged, by the names that `tokenizer.ggml.pre` has.

Names: llama.cpp's `src/llama-vocab.cpp`, but those of encoders. Expressions are those of the
models' own `tokenizer.json`, which llama.cpp's follow; where it has to write one in another way,
such as without classes of combining marks, the model's own is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from onnxport.exporter.gguf import alphabets

_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SIGNS_AND_SLASHES: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_LAST_SPACES: Final = r"\s+(?!\S)|\s+"
_SPACES: Final = rf"\s*[\r\n]+|{_LAST_SPACES}"
_GPT2_WORDS: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ONE_DIGIT: Final = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}|{_SIGNS}|{_SPACES}"
_THREE_DIGITS: Final = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"

# Words of GPT-4o begin with capitals and end with small letters, or are capitals alone.
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(numbers: str, signs: str, *, endings: str = "", no: str = "") -> str:
    """An expression of such words, which hold no letters of the class `no`."""
    upper, lower, first = f"[{_UPPER}{no}]", f"[{_LOWER}{no}]", r"[^\r\n\p{L}\p{N}]?"
    words = f"{first}{upper}*{lower}+{endings}|{first}{upper}+{lower}*{endings}"
    return f"{words}|{numbers}|{signs}|{_SPACES}"


_O200K: Final = _cased(r"\p{N}{1,3}", _SIGNS_AND_SLASHES, endings=_ENDINGS + "?")
_TEKKEN: Final = _cased(r"\p{N}", _SIGNS_AND_SLASHES)
_KIMI: Final = r"\p{Han}+|" + _cased(
    r"\p{N}{1,3}", _SIGNS, endings=_ENDINGS + "?", no=r"&&[^\p{Han}]"
)

# Digits in groups of three that are counted from the last one, in time that grows with their number
# alone; an expression with a look ahead to the last one needs the square of it.
_DIGITS_FROM_BEHIND: Final = (r"\p{N}+", r"\A\p{N}{1,2}(?=(?>\p{N}{3})+\z)", r"\p{N}{1,3}")

_ASCII_SIGNS: Final = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_MARKED: Final = rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK3_WORDS: Final = rf"{_MARKED}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_HAN_AND_KANA: Final = f"[{alphabets.HAN_AND_KANA}]+"


@dataclass(frozen=True, slots=True)
class Split:
    """How a text becomes words."""

    patterns: tuple[str, ...] = ()  # each cuts what those before it have left
    single_digits: bool = False  # each digit is a word, behind the patterns
    gpt2: bool = False  # GPT-2's pattern is the last one
    whole_words: bool = False  # a word that is a token is not made by merges
    composed: bool = False  # texts are brought to NFC first
    begins: bool = False  # a token begins texts, where the file does not say

    def pre_tokenizer(self) -> dict[str, Any]:
        """What `tokenizer.json` has for it."""
        level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": self.gpt2,
        }
        steps: list[dict[str, Any]] = [
            {"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False}
            for one in self.patterns
        ]
        if self.single_digits:
            steps.append({"type": "Digits", "individual_digits": True})
        return {"type": "Sequence", "pretokenizers": [*steps, level]}


_GPT2: Final = Split(gpt2=True)
_DIGITS_THEN_GPT2: Final = Split(single_digits=True, gpt2=True)
_LLAMA3: Final = Split((_THREE_DIGITS,), whole_words=True, begins=True)
_QWEN2: Final = Split((_ONE_DIGIT,))
_QWEN2_COMPOSED: Final = replace(_QWEN2, composed=True)
_DBRX: Final = Split((_THREE_DIGITS,))
_GPT_4O: Final = Split((_O200K,))
_DEEPSEEK3: Final = Split((r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK3_WORDS))
_BAILING: Final = Split(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        rf"|\s*[\r\n]|{_LAST_SPACES}",
    )
)
_TINY_AYA: Final = Split(
    # Digits in threes from behind where no letter follows, then from the beginning.
    (r"(?<!\d)\d++\b", r"\A\d{1,2}(?=(?>\d{3})+\z)", _O200K),
    composed=True,
)
_BLOOM_WORDS: Final = rf" ?[^(\s|{alphabets.BLOOMS_STOPS})]+"
_BLOOM: Final = Split((_BLOOM_WORDS,))

_BY_NAMES: Final[tuple[tuple[str, Split], ...]] = (
    ("gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 jais trillion granite-docling", _GPT2),
    ("olmo mpt", replace(_GPT2, composed=True)),
    ("refact smollm starcoder codeshell exaone minerva-7b mellum2", _DIGITS_THEN_GPT2),
    ("command-r", replace(_DIGITS_THEN_GPT2, composed=True)),
    ("llama3 llama-v3 llama-bpe lfm2 falcon3 falcon-h1 pixtral midm-2.0", _LLAMA3),
    ("glm4 glm5", replace(_LLAMA3, begins=False)),
    ("dbrx smaug-bpe chatglm-bpe", _DBRX),
    ("qwen2 deepseek-r1-qwen stablelm2 megrez kormo f2llmv2 hunyuan", _QWEN2_COMPOSED),
    ("grok-2 solar-open", _QWEN2),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT_4O),
    ("tekken", Split((_TEKKEN,), whole_words=True, begins=True)),
    ("kimi-k2", Split((_KIMI,), whole_words=True)),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _DEEPSEEK3),
    ("bailingmoe bailingmoe2 llada-moe", _BAILING),
    ("tiny_aya cohere2moe", _TINY_AYA),
    ("poro-chat bloom gpt3-finnish", _BLOOM),
    ("viking", replace(_BLOOM, single_digits=True)),
)
_OTHERS: Final[Mapping[str, Split]] = {
    "qwen35": Split(
        (
            rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        ),
        composed=True,
    ),
    "deepseek-llm": Split(
        (
            r"[\r\n]",
            rf"\s?[{alphabets.CASED}]+",
            rf"\s?[{alphabets.DEEPSEEKS_SIGNS}]+",
            r"\s+$",
            f"[{alphabets.DEEPSEEKS_CJK}]+",
        ),
        single_digits=True,
    ),
    "deepseek-coder": Split(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", f"[{alphabets.DEEPSEEKS_CJK}]+"),
        single_digits=True,
    ),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, r"[0-9][0-9][0-9]")),
    "seed-coder": Split((rf"{_ENDINGS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    "afmoe": Split((*_DIGITS_FROM_BEHIND, f"[{alphabets.ASIAN}]+", _DEEPSEEK3_WORDS)),
    "superbpe": Split(_DIGITS_FROM_BEHIND),
    "exaone-moe": Split(
        (
            rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_LAST_SPACES}",
        )
    ),
    "youtu": Split(
        (
            f"[{alphabets.HANGUL}]+|[{alphabets.YOUTUS_SIGNS}]+|[{alphabets.BOPOMOFO}]+"
            f"|{_HAN_AND_KANA}",
            _cased(r"\p{N}", _SIGNS_AND_SLASHES, endings=_ENDINGS + "?"),
        ),
        whole_words=True,
    ),
    "spark2_5": Split(
        (
            r"\p{N}{1,3}",
            _HAN_AND_KANA,
            rf"{_MARKED}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_LAST_SPACES}",
            r"\p{N}",
        )
    ),
    "minicpm5": Split(
        (r"\p{N}{1,3}", rf"{_ENDINGS}|{_LETTERS}|\p{{N}}+|{_SIGNS}|{_SPACES}"), whole_words=True
    ),
    "jais-2": Split(
        (
            rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+"
            + "".join(rf"|\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1))
            + r"|\s{1,2}(?!\S)|\s{1}",
        )
    ),
    "laguna": Split((r"[^\n]+|[\n]+", _ONE_DIGIT)),
    "ufakzeka": Split((rf"{_LETTERS}|\p{{N}}|{_SIGNS}|{_SPACES}",)),
    "chameleon": Split(
        (
            r"<sentinel:[0-9]+>",
            r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
        ),
        gpt2=True,
        begins=True,
    ),
}

SPLITS: Final[Mapping[str, Split]] = {
    **{name: split for names, split in _BY_NAMES for name in names.split()},
    **_OTHERS,
}
