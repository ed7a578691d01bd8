"""A tokenizer of byte pairs for checkpoints that are made here, which the converter reads."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_MERGES = (("n", "o"), ("y", "e"), ("ye", "s"))


def write_tokenizer(folder: Path, size: int = 259) -> None:
    """Write one with so many tokens, of which the last are "no", "ye" and "yes"."""
    joined = ["".join(pair) for pair in _MERGES]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: size - len(joined)]
    vocab = {text: number for number, text in enumerate((*letters, *joined))}
    found = Tokenizer(models.BPE(vocab, list(_MERGES)))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    found.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
