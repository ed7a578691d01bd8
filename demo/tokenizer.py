"""The demo models' tokenizer: a byte-level BPE of 2048 tokens, trained on the corpus.

Two choices help a small model:

* A digit is always a token of its own, so that sums line up.
* The merges that glue a leading space to a word piece come *last*. " Marcus" and "Marcus"
  therefore split at the same places, and copying a name from a sentence into JSON is one
  space-or-not decision on the first piece instead of two unrelated spellings.
"""

import json
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
MAX_LENGTH = 1024  # positions the models are made for
SPACED_PIECES = 620  # tokens spent on " piece" duplicates of frequent pieces
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
MARKERS = ("<tool_call>", "</tool_call>")  # one token each, but visible in decoded text
SPACE = "Ġ"  # how the byte-level alphabet writes 0x20

# What may share a token: a word with the character before it, one digit, a run of symbols.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TRAINING_PIECES = r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s"  # words without space


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Return a BPE tokenizer with exactly `VOCAB_SIZE` tokens, trained on `texts`."""
    texts = [_without_markup(text) for text in texts]
    vocab, merges = _learn_merges(texts, VOCAB_SIZE - len(SPECIAL) - len(MARKERS) - SPACED_PIECES)
    for piece in _pieces_after_space(texts, _build(vocab, merges))[:SPACED_PIECES]:
        vocab[SPACE + piece] = len(vocab)
        merges.append((SPACE, piece))
    tokenizer = _build(vocab, merges)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in MARKERS])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, chat_template: str, folder: Path) -> None:
    """Write the Hugging Face tokenizer files, with the chat template, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"eos_token": TURN_END, "pad_token": END_OF_TEXT}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        **special,
        "chat_template": chat_template,
    }
    for file, content in (("tokenizer_config", config), ("special_tokens_map", special)):
        (folder / f"{file}.json").write_text(json.dumps(content, indent=2) + "\n")


def _without_markup(text: str) -> str:
    for token in SPECIAL + MARKERS:
        text = text.replace(token, "\n")
    return text


def _learn_merges(texts: list[str], size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer(TRAINING_PIECES)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return dict(model["vocab"]), [(left, right) for left, right in model["merges"]]


def _pieces_after_space(texts: list[str], tokenizer: Tokenizer) -> list[str]:
    counts: Counter[str] = Counter()
    for encoding in tokenizer.encode_batch(texts):
        tokens = encoding.tokens
        counts.update(
            piece
            for space, piece in pairwise(tokens)
            if space == SPACE and piece[0].isalpha() and piece[0].isascii()
        )
    return [
        piece for piece, _ in counts.most_common() if SPACE + piece not in tokenizer.get_vocab()
    ]


def _build(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(PIECES)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
