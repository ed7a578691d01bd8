"""llama.cpp's own converter from transformers' checkpoints to GGUF files, in this process.

It brings a newer package `gguf` of its own, which it sees while it runs, and nobody else.
"""

from __future__ import annotations

import importlib
import logging
import runpy
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.published.places import LLAMA_CPP, OF_ADAPTERS

_OUT_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
_KEPT: dict[str, Any] = {}  # modules of the converter, between two conversions


def convert(
    checkpoint: Path,
    to: Path,
    outtype: str = "f32",
    hparams: Mapping[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Write the checkpoint in a folder to the GGUF file `to`, as `convert_hf_to_gguf.py` does.

    A folder without `tokenizer.json` gets no vocabulary. One with it gets that, whose words are cut
    as GPT-2's: the converter knows published tokenizers alone.

    Args:
        checkpoint: The folder.
        to: The file.
        outtype: Of matrices: f32, f16, bf16 or q8_0.
        hparams: What `config.json` says besides, where this transformers spells it otherwise.
        options: What else the converter's model is made with, such as `fuse_qkv`.

    Raises:
        NotImplementedError: The converter does not know the model.
    """
    with _own_modules():
        conversion = importlib.import_module("conversion")
        told = conversion.ModelBase.load_hparams(checkpoint, False)
        kind = conversion.get_model_architecture(told, conversion.ModelType.TEXT)
        model = conversion.get_model_class(kind)
        file_type = getattr(importlib.import_module("gguf").LlamaFileType, _OUT_TYPES[outtype])
        has_tokenizer = (checkpoint / "tokenizer.json").is_file()
        with _tokenizers(kept=has_tokenizer), torch.inference_mode():
            model(checkpoint, file_type, to, hparams={**told, **(hparams or {})}, **options).write()
    return to


def package() -> Any:
    """The converter's package `gguf`."""
    with _own_modules():
        return importlib.import_module("gguf")


def convert_adapter(
    folder: Path,
    base: Path,
    to: Path,
    outtype: str = "f32",
    hparams: Mapping[str, Any] | None = None,
) -> Path:
    """Write PEFT's adapter in a folder to the GGUF file `to`, as `convert_lora_to_gguf.py` does.

    Args:
        folder: The adapter.
        base: The checkpoint that it was trained on.
        to: The file.
        outtype: Of matrices: f32, f16, bf16 or q8_0.
        hparams: As of `convert`.

    Raises:
        SystemExit: The converter refuses the adapter, or does not know the model.
    """
    arguments = [str(OF_ADAPTERS), "--base", str(base), "--outfile", str(to)]
    arguments += ["--outtype", outtype, str(folder)]
    with _own_modules(), patch.object(sys, "argv", arguments), patch.object(logging, "basicConfig"):
        models = importlib.import_module("conversion").ModelBase
        told = {**models.load_hparams(base, False), **(hparams or {})}
        with patch.object(models, "load_hparams", lambda *_, **__: told):
            runpy.run_path(str(OF_ADAPTERS), run_name="__main__")
    return to


@contextmanager
def _own_modules() -> Iterator[None]:
    """Let `import gguf` find the converter's, which others must not get, and `conversion` too."""
    others = _taken_out()
    sys.modules.update(_KEPT)
    paths = [str(LLAMA_CPP), str(LLAMA_CPP / "gguf-py")]
    before = sys.path.copy()
    sys.path[:0] = paths
    try:
        yield
    finally:
        sys.path[:] = before
        _KEPT.update(_taken_out())
        sys.modules.update(others)


def _taken_out() -> dict[str, Any]:
    names = [name for name in sys.modules if name.partition(".")[0] in ("gguf", "conversion")]
    return {name: sys.modules.pop(name) for name in names}


@contextmanager
def _tokenizers(*, kept: bool) -> Iterator[None]:
    """Let every model that was imported write its vocabulary, of byte pairs, or none."""
    text_model = importlib.import_module("conversion.base").TextModel
    with ExitStack() as stack:
        missing = patch.object(
            text_model, "_create_vocab_sentencepiece", side_effect=FileNotFoundError
        )
        stack.enter_context(missing)  # it would import a package for that
        for model in (text_model, *_below(text_model)):
            if "get_vocab_base_pre" in vars(model):
                stack.enter_context(patch.object(model, "get_vocab_base_pre", lambda *_: "gpt-2"))
            if "set_vocab" in vars(model) and not kept:
                none = text_model._set_vocab_none
                stack.enter_context(patch.object(model, "set_vocab", none))
        yield


def _below(model: Any) -> list[Any]:
    return [one for each in model.__subclasses__() for one in (each, *_below(each))]
