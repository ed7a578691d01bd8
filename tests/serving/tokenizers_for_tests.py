"""Tiny tokenizers, trained or written here: byte-level BPE, and one with byte fallback."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

CORPUS = [
    "the sea is wide and the sea is deep",
    "naïve café — 日本語のテキスト, emoji 👩‍🚀🙂 and Ελληνικά",
    "stop here; STOP there. Human: hello\n\nAssistant: hi",
]
EOS, TOOL = "<|eos|>", "<tool call>"


def byte_level() -> FastTokenizer:
    """Every byte is a token, and some runs of bytes, that may end inside a character."""
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[EOS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(TOOL, special=False)])
    return tokenizer


def byte_fallback() -> FastTokenizer:
    """Words begin with ▁, the first space is stripped, and unknown characters become bytes."""
    words = ["▁the", "▁sea", "▁is", "▁", "s", "e", "a", "t", "h", "i", "d", "w", "▁de", "p"]
    vocab = {"<unk>": 0, EOS: 1}
    for piece in [*(f"<0x{byte:02X}>" for byte in range(256)), *words]:
        vocab[piece] = len(vocab)
    tokenizer = FastTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer
