"""`tokenizer.json` and the small files beside it, from the metadata of a GGUF file."""

from __future__ import annotations

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.gguf.reranker import PLACES, pair_template
from onnxport.exporter.gguf.roles import CONTROL, USER_DEFINED
from onnxport.exporter.gguf.splits import SPLITS, Split
from onnxport.exporter.gguf.vocabulary import (
    ADVICE,
    BYTE,
    NORMAL,
    PREFIX,
    SPACE,
    UNKNOWN,
    UNUSED,
    Vocabulary,
)
from onnxport.exporter.source import PAIRS, TEMPLATE_FOLDER

logger = logging.getLogger(__name__)

_TEMPLATE: Final = "tokenizer.chat_template"
_TEMPLATE_NAME: Final = re.compile(r"[\w.-]{1,100}", re.ASCII)  # which becomes a file's
_WHOLE: Final = "tokenizer.huggingface.json"
# Byte pairs of Unicode's letters, by the names of cuts; there are none.
_SPACED: Final = ("gemma4", "sarvam-moe")
# Architectures whose merges are in the order of their tokens, and not of these' scores.
_BY_PLACE: Final = ("gemma", "gemma2", "gemma3")
# Architectures whose added tokens, of SentencePiece, take in the spaces behind them, but for these.
_STRIPPED: Final = ("phi3",)
_NOT_STRIPPED: Final = ("<unk>", "<s>", "<|endoftext|>")
_SAMPLING: Final[Mapping[str, str]] = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_SAMPLING_PREFIX: Final = "general.sampling."
_NO_SAMPLER: Final = ("general.sampling.mirostat", "general.sampling.xtc_probability")  # where 0


def write_files(values: Mapping[str, Any], path: Path, architecture: str, folder: Path) -> None:
    """Write what the metadata `values` of the file `path` say of tokens and templates.

    Args:
        values: All keys.
        path: The file, for errors.
        architecture: Its architecture.
        folder: Where to write.

    Raises:
        CheckpointError: The values contradict each other.
        UnsupportedModelError: A tokenizer that is not known; what to do instead.
    """
    found = Vocabulary.read(values, path)
    if found is None:
        return
    whole = values.get(_WHOLE)
    if isinstance(whole, str):
        (folder / "tokenizer.json").write_text(whole, encoding="utf-8")
    else:
        _write(folder / "tokenizer.json", tokenizer(found, architecture))
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    special = {f"{short}_token": found.text(name) for name, short in names.items()}
    config = {name: text for name, text in special.items() if text is not None}
    fills = {"infill_tokens": told} if (told := found.fills_by()) else {}
    _write(
        folder / "tokenizer_config.json",
        {**config, "clean_up_tokenization_spaces": False, **fills},
    )
    _write(folder / "generation_config.json", _generation(values, found))
    _write_templates(values, path, folder)


def tokenizer(found: Vocabulary, architecture: str) -> dict[str, Any]:
    """What `tokenizer.json` holds; see `write_files`."""
    twice = [token for token, count in Counter(found.tokens).items() if count > 1]
    if twice:
        raise CheckpointError(
            f"{found.path} has {len(twice)} tokens more than once, such as {twice[0]!r}, and which "
            f"one texts have is not told. {ADVICE}"
        )
    vocab = {token: place for place, token in enumerate(found.tokens)}
    for place, kind in enumerate(found.types):
        if kind == UNUSED and place not in found.special.values():
            del vocab[found.tokens[place]]
    is_gemma4 = found.kind == "gemma4" or (found.kind, found.pre) == ("gpt2", "gemma4")
    if is_gemma4 or (found.kind == "gpt2" and found.pre in _SPACED):
        parts = _spaced_pairs(found, vocab)
        begins = is_gemma4
    elif found.kind == "gpt2":
        split = _split(found)
        parts = _byte_level(found, vocab, split)
        begins = split.begins
    else:
        parts = _sentence_piece(found, vocab, by_place=architecture in _BY_PLACE)
        begins = True
    if found.adds_bos is not None and not is_gemma4:  # which older files deny
        begins = found.adds_bos
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(
            found, strips=found.kind == "llama" and architecture in _STRIPPED
        ),
        "post_processor": _around(found, begins),
        **parts,
    }


def _split(found: Vocabulary) -> Split:
    split = SPLITS.get(found.pre or "")
    if split is None:
        what = "does not say" if found.pre is None else f"says {found.pre!r}"
        raise UnsupportedModelError(
            f"{found.path} {what} how texts are cut into words ({PREFIX}pre); known are "
            f"{', '.join(sorted({*SPLITS, *_SPACED}))}. {ADVICE}"
        )
    return split


def _byte_level(found: Vocabulary, vocab: Mapping[str, int], split: Split) -> dict[str, Any]:
    """Byte pairs, as GPT-2 has them."""
    return {
        "normalizer": {"type": "NFC"} if split.composed else None,
        "pre_tokenizer": split.pre_tokenizer(),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
        "model": _model(vocab, _merges(found, vocab)) | {"ignore_merges": split.whole_words},
    }


def _spaced_pairs(found: Vocabulary, vocab: Mapping[str, int]) -> dict[str, Any]:
    """Byte pairs whose letters are Unicode's, with SentencePiece's space, as Gemma 4 has them."""
    return {
        **_spaces(prefix=False),
        "model": _model(vocab, _merges(found, vocab)) | _unknowns(found),
    }


def _merges(found: Vocabulary, vocab: Mapping[str, int]) -> list[list[str]]:
    merges = [merge.split(" ") for merge in found.merges]
    wrong = next((one for one in merges if not _is_merge(one, vocab)), None)
    if wrong is not None or not merges:
        raise CheckpointError(
            f"{found.path} has {len(merges)} merges of tokens, of which {wrong} is none of two "
            f"tokens to a third one. {ADVICE}"
        )
    return merges


def _is_merge(parts: list[str], vocab: Mapping[str, int]) -> bool:
    """Whether they are two tokens, which together are a third one."""
    return len(parts) == 2 and parts[0] in vocab and parts[1] in vocab and "".join(parts) in vocab


def _sentence_piece(
    found: Vocabulary, vocab: Mapping[str, int], *, by_place: bool
) -> dict[str, Any]:
    """SentencePiece's byte pairs: of two neighbours those whose whole has the highest score."""
    places = {
        token: place
        for place, (token, kind) in enumerate(zip(found.tokens, found.types, strict=True))
        if kind == NORMAL
    }
    order = sorted(places.values(), key=lambda one: one if by_place else -found.scores[one])
    sizes = set(map(len, places))  # others need not be cut out, which of a long token takes long
    merges = [
        [whole[:cut], whole[cut:]]
        for place in order
        for whole in (found.tokens[place],)
        for cut in range(1, len(whole))
        if cut in sizes and len(whole) - cut in sizes
        if whole[:cut] in places and whole[cut:] in places
    ]
    return {
        **_spaces(prefix=found.space_prefix),
        "model": _model(vocab, merges) | _unknowns(found),
    }


def _spaces(*, prefix: bool) -> dict[str, Any]:
    """Texts whose spaces are tokens' first letter, one before the text, too, if there is one."""
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    ahead = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*ahead, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def _unknowns(found: Vocabulary) -> dict[str, Any]:
    """What a model has for letters that are no tokens: bytes, or a token for all of them."""
    unknown = found.special.get("unknown")
    if unknown is None:
        unknown = next((place for place, kind in enumerate(found.types) if kind == UNKNOWN), None)
    return {
        "unk_token": None if unknown is None else found.tokens[unknown],
        "fuse_unk": True,
        "byte_fallback": BYTE in found.types,
    }


def _model(vocab: Mapping[str, int], merges: list[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": dict(vocab),
        "merges": merges,
    }


def _added_tokens(found: Vocabulary, *, strips: bool) -> list[dict[str, Any]]:
    """Tokens that are found in texts before anything else is done with them."""
    special = set(found.ends())
    if "bos" in found.special:
        special.add(found.special["bos"])
    return [
        {
            "id": place,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and token not in _NOT_STRIPPED,
            "normalized": False,
            "special": kind != USER_DEFINED or place in special,
        }
        for place, (token, kind) in enumerate(zip(found.tokens, found.types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) or place in special
    ]


def _around(found: Vocabulary, begins: bool) -> dict[str, Any] | None:
    """What puts tokens around a text; None: nothing does."""
    for name, is_told in (("bos", found.adds_bos), ("eos", found.adds_eos)):
        if is_told and name not in found.special:
            raise CheckpointError(
                f"{found.path} says that texts have the token {name}, and not which one it is. "
                f"{ADVICE}"
            )
    first = [found.tokens[found.special["bos"]]] if begins and "bos" in found.special else []
    last = [found.tokens[found.special["eos"]]] if found.adds_eos else []
    if not first and not last:
        return None

    def items(sequence: str, number: int) -> list[dict[str, Any]]:
        def token(text: str) -> dict[str, Any]:
            return {"SpecialToken": {"id": text, "type_id": number}}

        whole = {"Sequence": {"id": sequence, "type_id": number}}
        return [*map(token, first), whole, *map(token, last)]

    return {
        "type": "TemplateProcessing",
        "single": items("A", 0),
        "pair": [*items("A", 0), *items("B", 1)],
        "special_tokens": {
            text: {"id": text, "ids": [found.tokens.index(text)], "tokens": [text]}
            for text in (*first, *last)
        },
    }


def _generation(values: Mapping[str, Any], found: Vocabulary) -> dict[str, Any]:
    """What `generation_config.json` holds: ends, and how the model wants to be sampled."""
    config: dict[str, Any] = {"eos_token_id": found.ends()}
    for name, key in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        if name in found.special:
            config[key] = found.special[name]
    if found.suppressed:
        config["suppress_tokens"] = list(found.suppressed)
    sampling = _sampling(values, found.path)
    return config | ({"do_sample": True} | sampling if sampling else {})


def _sampling(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """How the model wants to be sampled; a warning tells what of it no artifact can say.

    Raises CheckpointError for what is no number.
    """
    told = {key: one for key, one in values.items() if key.startswith(_SAMPLING_PREFIX)}
    for key in told.keys() & _SAMPLING.keys():
        if type(told[key]) not in (int, float) or not math.isfinite(told[key]):
            raise CheckpointError(f"{path}: {key} is {str(told[key])[:80]!r}, and no number.")
    others = [
        f"{key} = {str(one)[:80]}"
        for key, one in sorted(told.items())
        if key not in _SAMPLING and not (key in _NO_SAMPLER and one == 0)
    ]
    if others:
        logger.warning(
            "%s wants to be sampled by %s, which the artifact does not tell; of these keys %s are",
            *(path, ", ".join(others), ", ".join(_SAMPLING)),
        )
    return {name: told[key] for key, name in _SAMPLING.items() if key in told}


def _write_templates(values: Mapping[str, Any], path: Path, folder: Path) -> None:
    """Write chat templates: that of every request, and those which have names."""
    for key, text in values.items():
        if key != _TEMPLATE and not key.startswith(_TEMPLATE + "."):
            continue
        name = key.removeprefix(_TEMPLATE).removeprefix(".")
        if not isinstance(text, str) or (name and not _TEMPLATE_NAME.fullmatch(name)):
            raise CheckpointError(
                f"{path}: {key[:120]!r} is no text of a template, or has no name of one, which is "
                f"of letters, digits, '_', '-' and '.', at most 100. {ADVICE}"
            )
        if name:
            (folder / TEMPLATE_FOLDER).mkdir(exist_ok=True)
            written = _pairs(text, path) if name == PAIRS else text
            (folder / TEMPLATE_FOLDER / f"{name}.jinja").write_text(written, encoding="utf-8")
        else:
            (folder / "chat_template.jinja").write_text(text, encoding="utf-8")


def _pairs(text: str, path: Path) -> str:
    """The template of a text of pairs. Raises CheckpointError where a pair has no place in it."""
    if missing := [place for place in PLACES if place not in text]:
        raise CheckpointError(
            f"{path}: the text of a pair, {_TEMPLATE}.{PAIRS}, has no {' and no '.join(missing)}, "
            f"so all would be judged alike. {ADVICE}"
        )
    return pair_template(text)


def _write(path: Path, value: Mapping[str, Any]) -> None:
    # In one line: with `indent` it takes seconds for a large vocabulary.
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
