"""Forms of text for benchmarks of structured output, and a tokenizer to write them with.

Made up, so that a checkpoint of random weights, which has no tokenizer worth its name, can be
measured with as many tokens as the real model has. Needs nothing of ours: peers use it, too.
"""

from __future__ import annotations

import random
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = "<|end|>"
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "born": {"type": "string", "format": "date"},
        "score": {"type": "number", "minimum": 0, "maximum": 100},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "parent": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
    },
    "required": ["name", "born", "score", "tags", "parent"],
    "additionalProperties": False,
}
FORMS = ("json schema", "json object", "regex", "regex that counts")


def form_of(name: str, number: int) -> dict[str, Any]:
    """Return a form, `json` or `regex`, that no round before had: no masks of it are known yet."""
    if name == "regex":
        return {"regex": rf"([a-z]{{2,8}} [0-9]{{1,3}}[,;] )+END{number}"}
    if name == "regex that counts":
        return {"regex": rf"([a-z]{{2,8}} [0-9]{{1,3}}[,;] ){{{500 + number}}}"}
    if name == "json object":  # as json_object is, but for a title, which changes nothing
        return {"json": {"type": "object", "title": str(number)}}
    return {"json": {"type": "array", "items": RECORD, "minItems": 200 + number}}


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a byte-level tokenizer of as many tokens: bytes, words, punctuation, digits, END."""
    dice = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    weights = [12, 9, 8, 8, 7, 7, 6, 6, 6, 4, 4, 3, 3, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1]
    ends = ["", "", "", '":', '",', ",", ".", "}", "]", '"', "\u010a", "()", ";"]
    vocab = {
        char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    while len(vocab) < vocab_size - 1:
        word = "".join(dice.choices(letters, weights, k=dice.randint(1, 9)))
        if dice.random() < 0.1:
            word = str(dice.randrange(10**5))
        word = word.capitalize() if dice.random() < 0.2 else word
        start = dice.choice(["", "\u0120", "\u0120", '"', '{"', "\u0120\u0120"])
        vocab.setdefault(start + word + dice.choice(ends), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer
