"""Which tokens of a GGUF file end what a model says, and which ones it fills in by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

CONTROL: Final = 3  # types of tokens
USER_DEFINED: Final = 4

NAMED_ENDS: Final = ("eos", "eot", "eom")
# Tokens to fill in by, as `tokenizer_config.json` of an artifact calls them, and their keys, of
# which older files have the second one.
FILLING: Final[Mapping[str, tuple[str, ...]]] = {
    "prefix": ("fim_pre", "prefix"),
    "suffix": ("fim_suf", "suffix"),
    "middle": ("fim_mid", "middle"),
    "pad": ("fim_pad",),
    "repo_name": ("fim_rep",),
    "file_separator": ("fim_sep",),
}
FILLING_KEYS: Final = tuple(key for keys in FILLING.values() for key in keys)

_FILLING_ENDS: Final = ("fim_pad", "fim_rep", "fim_sep")  # behind which nothing of a text comes
_TAG: Final = "</s>"  # which Gemma has as text, for it is HTML's, too
# Tokens that end what a model says, whatever else a file calls its end, and whatever it calls them;
# llama.cpp has these, and ends there.
_ENDS: Final = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>"),
        *("<|flush|>", "<|calls|>", "<end_of_turn>", "<end_of_utterance>", "<|endoftext|>"),
        *("<|end_of_text|>", "<EOT>", "\u2581<EOT>", "[EOT]", "[EOS]", "<eos>", _TAG),
        *("<turn|>", "<|tool_response>", "[e~["),
        "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek's
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|file_sep|>"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    }
)
# Where a vocabulary has all of such a group, the last one ends no text, but a part of it.
_PARTS: Final = (
    ("<|return|>", "<|call|>", "<|end|>"),  # gpt-oss
    ("<|flush|>", "<|call|>", "<|end|>"),
    ("<|flush|>", "<|calls|>", "<|end|>"),  # Solar Open
)


def ends(named: Mapping[str, int], tokens: Sequence[str], types: Sequence[int]) -> list[int]:
    """The tokens that end what the model says, its own end first.

    Args:
        named: Special tokens by their keys.
        tokens: The vocabulary.
        types: Of each token.
    """
    own = [named[name] for name in NAMED_ENDS if name in named]
    known = {
        token: place
        for place, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED) and token in _ENDS
        if token != _TAG or kind == CONTROL or not own
    }
    for group in _PARTS:
        if known.keys() >= {*group}:
            del known[group[-1]]
    filling = [named[name] for name in _FILLING_ENDS if name in named]
    return list(dict.fromkeys([*own, *known.values(), *filling]))


def filling(named: Mapping[str, int], tokens: Sequence[str]) -> dict[str, str]:
    """The tokens to fill in by that a file names, as the vocabulary spells them."""
    found = {
        role: next((named[key] for key in keys if key in named), None)
        for role, keys in FILLING.items()
    }
    return {role: tokens[place] for role, place in found.items() if place is not None}
