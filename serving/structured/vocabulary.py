"""The model's tokens as the grammar compiler knows them."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onnxport.errors import RequestError
from onnxport.serving.structured.names import NO_NAMES, TokenNames
from onnxport.serving.tokenizer import byte_alphabet

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from onnxport.serving.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a grammar has to know of the model and its tokenizer.

    Attributes:
        tokens: the tokenizer's tokens, those that the model has beyond them included; these are
            never allowed.
        vocab_size: of the model.
        has_end: whether a token of the model ends a text; otherwise one beyond
            them all stands for the end.
        longest_token: no token's text has more characters.
        names: by which grammars may ask for tokens.
        text_ends: end tokens that are text, too, such as an end of a line.
        most_closed: no token's text has more of the brackets that end lists and objects of JSON.
    """

    tokens: LLTokenizer
    vocab_size: int
    has_end: bool
    longest_token: int
    most_closed: int
    names: TokenNames = NO_NAMES
    text_ends: tuple[int, ...] = ()

    @property
    def num_words(self) -> int:
        """Words of 32 tokens that a mask of the model's tokens has."""
        return -(-self.vocab_size // 32)

    @property
    def num_all_words(self) -> int:
        """Words of 32 tokens that a mask of the tokenizer's tokens has, at least those above."""
        return max(self.num_words, -(-self.tokens.vocab_size // 32))

    @classmethod
    def build(
        cls, tokenizer: Tokenizer, vocab_size: int, end_token_ids: Collection[int]
    ) -> Vocabulary:
        """Read a tokenizer; takes a second for the largest.

        Args:
            tokenizer: of the model.
            vocab_size: tokens of the model's logits.
            end_token_ids: each of them ends a text.

        Raises:
            RequestError: grammars cannot be made of this tokenizer's tokens.
        """
        from llguidance import LLTokenizer

        ends = sorted(one for one in end_token_ids if one < vocab_size)
        size = max(vocab_size, tokenizer.vocab_size)
        has_end = bool(ends)
        if not has_end:
            ends, size = [size], size + 1
        described = json.loads(tokenizer.to_json())
        names = tokenizer.vocabulary()
        missing = set(range(size)).difference(names.values())
        below = sorted(one for one in missing if one <= ends[-1])
        described["added_tokens"] += map(_special, below)
        plain = _make_plain(described, ends)
        text = json.dumps(described)
        try:
            tokens = LLTokenizer(text, n_vocab=size, eos_token=ends)
        except ValueError as error:
            raise RequestError(
                f"this model's tokenizer does not allow structured outputs: {error}; leave them "
                "out, or serve another model",
                "structured_outputs",
            ) from error
        # A character of a token's name stands for a byte or a character of its text; a name such as
        # <0x7D> for one byte.
        most_closed = max(1, *(name.count("]") + name.count("}") for name in names))
        longest = max(map(len, names))
        text_ends = tuple(
            one for one in ends if one < tokenizer.vocab_size and not tokenizer.is_special(one)
        )
        bracketed = {
            name: one for name, one in names.items() if name.startswith("<") and name.endswith(">")
        }
        told = TokenNames(frozenset(plain), bracketed, vocab_size, frozenset([*ends, *missing]))
        return cls(tokens, vocab_size, has_end, longest, most_closed, told, text_ends)


def _make_plain(described: dict[str, Any], ends: Collection[int]) -> list[str]:
    """Let added tokens that are text, such as `<tool_call>`, be text for the compiler too.

    It takes every added token in angle brackets for a special one, which no text is made of. A
    model would have to spell out what it was trained to write as one token. So these become
    ordinary tokens; the others join them in the vocabulary, or they would lose their ids.

    Args:
        described: a tokenizer.json; changed.
        ends: the end tokens, which are special whatever the file says.

    Returns:
        Their texts.
    """
    added, vocab = described["added_tokens"], described["model"].get("vocab")
    plain = [
        one
        for one in added
        if one["content"].startswith("<") and not one["special"] and one["id"] not in ends
    ]
    if not plain or not isinstance(vocab, dict):
        return []
    byte_level = '"ByteLevel"' in json.dumps(described.get("decoder"))
    for one in plain:
        vocab.pop(one["content"], None)
    for one in added:
        vocab[_spelling(one["content"], byte_level) if one in plain else one["content"]] = one["id"]
    described["added_tokens"] = [one for one in added if one not in plain]
    return [one["content"] for one in plain]


def _spelling(text: str, byte_level: bool) -> str:
    """Return how a vocabulary spells a text: a printable character a byte, or ▁ for a space."""
    if not byte_level:
        return text.replace(" ", "▁")
    chars = {byte: char for char, byte in byte_alphabet().items()}
    return "".join(chars[byte] for byte in text.encode())


def _special(token_id: int) -> dict[str, object]:
    """Return a token that the tokenizer does not have, as tokenizer.json describes one."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": f"<|{token_id}|>", "special": True, **flags}
