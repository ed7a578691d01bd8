"""Turn a checkpoint into a GGUF file, for llama.cpp as a peer.

    PEER_PYTHON -m benchmarks.make_gguf CHECKPOINT MODEL.gguf --head q8_0

llama.cpp's own converter does it, which `scripts/published.py` fetches, and then its own quantizer,
so every family that it knows can be compared. Matrices become Q4_0 but for those that it never
quantizes, such as routers; embedding and head Q8_0, like those of an onnxport artifact in int4, or
Q4_0 if asked for. There is no tokenizer in it: the workloads are token ids.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts import published

TYPES = ("q4_0", "q8_0", "f16")
PUBLISHED = Path(__file__).parents[1] / "build" / "published"


def convert(checkpoint: Path, to: Path, converter: Path) -> None:
    """Write a checkpoint as it is, in 16 bits or, of MXFP4, in that.

    Args:
        checkpoint: a folder with config.json and safetensors.
        to: the file to write.
        converter: llama.cpp's sources, or as much of them as `scripts/published.py` keeps.

    Raises:
        SystemExit: the converter does not know such models.
    """
    for folder in (converter, converter / "gguf-py"):
        sys.path.insert(0, str(folder))
    gguf = importlib.import_module("gguf")
    conversion = importlib.import_module("conversion")
    kinds = conversion.ModelBase
    text = conversion.ModelType.TEXT
    architecture = conversion.get_model_architecture(kinds.load_hparams(checkpoint, False), text)
    try:
        known = conversion.get_model_class(architecture, mmproj=False)
    except NotImplementedError:
        raise SystemExit(f"llama.cpp's converter does not know {architecture}") from None
    tokenless = type(known.__name__, (known,), {"model_arch": known.model_arch, **_TOKENLESS})
    with tempfile.TemporaryDirectory(dir=to.parent) as temporary:
        link(checkpoint, Path(temporary))
        with importlib.import_module("torch").inference_mode():
            tokenless(Path(temporary), gguf.LlamaFileType.MOSTLY_F16, to).write()


def link(checkpoint: Path, folder: Path) -> None:
    """Let a folder be a checkpoint, with a tokenizer that has a name for each token.

    Converters of some families leave out rows of the embedding that a tokenizer has no names for.
    """
    for one in checkpoint.iterdir():
        if not one.name.startswith("tokenizer"):
            (folder / one.name).symlink_to(one.resolve())
    count = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    names = {f"{number}": number for number in range(count)}
    tokenizer = {"model": {"vocab": names, "merges": []}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def _no_vocabulary(model: Any) -> None:
    model._set_vocab_none()
    model.gguf_writer.add_vocab_size(model.hparams["vocab_size"])


_TOKENLESS = {"set_vocab": _no_vocabulary, "no_mtp": True}


def quantize(found: Path, to: Path, matrices: str, head: str) -> None:
    """Let llama.cpp quantize a file.

    Raises:
        SystemExit: it fails.
    """
    llama = importlib.import_module("llama_cpp")
    options = llama.llama_model_quantize_default_params()
    options.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{matrices.upper()}")
    head_type = getattr(llama, f"GGML_TYPE_{head.upper()}")
    options.output_tensor_type = options.token_embedding_type = head_type
    options.pure = True
    if llama.llama_model_quantize(str(found).encode(), str(to).encode(), options):
        raise SystemExit(f"llama.cpp could not quantize {found} to {matrices}")


def main() -> None:
    """Parse arguments and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--matrices", choices=TYPES, default="q4_0")
    parser.add_argument("--head", choices=TYPES, default="q8_0")
    parser.add_argument(
        "--published", type=Path, default=PUBLISHED, help="where scripts/published.py puts things"
    )
    arguments = parser.parse_args()
    if not list(arguments.checkpoint.glob("*.safetensors")):
        raise SystemExit(f"{arguments.checkpoint} has no safetensors; make_checkpoint.py writes it")
    converter = published.fetch_llama_cpp(arguments.published)
    logging.getLogger("hf-to-gguf").setLevel(logging.WARNING)
    if arguments.matrices == "f16":
        convert(arguments.checkpoint, arguments.output, converter)
        return
    with tempfile.TemporaryDirectory(dir=arguments.output.parent) as temporary:
        whole = Path(temporary) / "whole.gguf"
        convert(arguments.checkpoint, whole, converter)
        quantize(whole, arguments.output, arguments.matrices, arguments.head)


if __name__ == "__main__":
    main()
