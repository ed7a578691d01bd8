"""The suite's artifacts: tiny models of every family, of some in every precision.

    python -m tests.conformance.make DIR

PyTorch makes the checkpoints, so this runs where it is installed; `pytest tests/conformance
--artifacts DIR` then needs neither it nor transformers.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Final

from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions

FAMILIES: Final = ("llama", "mistral-window", "qwen2", "qwen3")
PRECISIONS: Final = ("fp32", "fp16", "int8", "int4")
MXFP4: Final = "mxfp4"  # int4 with experts in MXFP4, as the checkpoint has them
AWQ: Final = "awq"  # int4 whose checkpoint is in AWQ's integers, with zero points
# int4 with offsets and int8, of a GGUF file whose matrices are in Q4_1, some in Q8_0.
Q4_1: Final = "q4_1"
# Each family and each precision once, where all pairs would take too long.
DIAGONAL: Final = (
    ("llama", "fp16"),
    ("mistral-window", "fp32"),
    ("qwen2", "int8"),
    ("qwen3", "int4"),
)
# What software runs that plays a device, hundreds of times slower than one.
SOFTWARE: Final = (*DIAGONAL, ("qwen2", AWQ), ("qwen3-moe", "int4"))
# Attention of latents: what a device's own, and a cache of int4, do not have.
LATENT: Final = (
    ("axk1", "fp32"),
    ("deepseek-v2", "fp16"),
    ("deepseek-v2-lite", "int4"),
    ("deepseek-v3", "fp16"),
    ("glm4-moe-lite", "fp32"),
    ("kimi-linear", "fp32"),  # beside layers with a state
    ("minicpm3", "int8"),
)
# Layers that differ in their heads or share keys and values.
MIXED: Final = (
    ("gemma4-moe-all", "int8"),
    ("gemma4-shared", "fp32"),
    ("mimo-v2-flash", "fp16"),
)
# Layers with a state in place of keys and values.
HYBRID: Final = (("qwen3.5", "fp32"), ("lfm3", "fp32"))
# Attention in chunks.
CHUNKS: Final = (("llama4-chunks", "fp32"),)
# Families whose graphs are of the same operators, in one precision.
ONCE: Final = (
    *LATENT,
    *MIXED,
    *HYBRID,
    *CHUNKS,
    ("afmoe", "fp16"),
    ("afmoe-dense", "int4"),
    ("apertus", "int4"),
    ("arcee", "fp16"),
    ("cohere", "int8"),
    ("cohere-norms", "fp16"),
    ("cohere2", "int4"),
    ("cohere2-moe", "int8"),
    ("ernie-biases", "int8"),
    ("ernie-moe", "int8"),
    ("exaone4", "int4"),
    ("flex-olmo", "fp16"),
    ("gemma2", "int8"),
    ("gemma3", "int8"),
    ("glm", "int4"),
    ("glm4", "int8"),
    ("glm4-moe", "fp16"),
    ("gpt-neox", "int8"),
    ("gpt-oss", "int4"),
    ("gpt-oss", MXFP4),
    ("gpt2", "int4"),
    ("granite", "int8"),
    ("granite-swa", "fp16"),
    ("granitemoe", "int4"),
    ("helium", "fp16"),
    ("hunyuan", "int4"),
    ("hunyuan-moe", "fp16"),
    ("hy-v3", "fp16"),
    ("jais2", "int4"),
    ("laguna", "fp16"),
    ("laguna-full", "int8"),
    ("llama4", "fp16"),
    ("ministral3-text", "int4"),
    ("minimax-m2-tied", "int4"),
    ("mixtral", "fp16"),
    ("nemotron", "int4"),
    ("olmo", "int8"),
    ("olmo2", "int4"),
    ("olmo3", "fp32"),
    ("olmoe", "int8"),
    ("opt-350m", "int8"),
    ("phi", "int4"),
    ("phi3-longrope", "int4"),
    ("qwen2", AWQ),
    ("qwen2", Q4_1),
    ("qwen2-moe", "int4"),
    ("qwen3-moe", "int4"),
    ("seed-oss", "fp16"),
    ("smollm3-window", "fp32"),
    ("stablelm-parallel", "int4"),
    ("starcoder2", "int4"),
)
CASES: Final = (*product(FAMILIES, PRECISIONS), *ONCE)
GROUP_SIZE: Final = 32


def artifact_path(folder: Path, case: str, precision: str) -> Path:
    """Where the artifact of a case lies in `folder`."""
    return folder / f"{case}-{precision}" / "artifact"


def make_artifact(folder: Path, case: str, precision: str) -> Path:
    """Export a case of `tests.exporter.checkpoints`, unless it is there; returns its folder."""
    path = artifact_path(folder, case, precision)
    if not path.exists():
        from tests.exporter import checkpoints

        checkpoint = path.with_name("checkpoint")
        known = {**checkpoints.CASES, **checkpoints.HYBRID, **checkpoints.KIMI}
        made = {**known, **checkpoints.SHORT_CONV}[case]
        checkpoints.make(made, checkpoint)
        if precision == AWQ:
            from tests.exporter import integers

            integers.store_awq(checkpoint, GROUP_SIZE)
        if precision == Q4_1:
            checkpoint = _in_q4_1(checkpoint)
        options = replace(export_options(precision), context_length=made.context_length)
        export_model(checkpoint, path, options)
    return path


def _in_q4_1(checkpoint: Path) -> Path:
    """A GGUF file of a checkpoint."""
    from tests.exporter.ggufs import Kind, write

    def kind(name: str, _: object) -> Kind:
        return Kind.Q8_0 if "attn_output" in name or not name.startswith("blk.") else Kind.Q4_1

    return write(checkpoint, checkpoint.with_suffix(".gguf"), kind)


def export_options(precision: str) -> ExportOptions:
    """How a case is exported in one of the precisions above."""
    if precision == MXFP4:
        return ExportOptions(precision="int4", expert_precision="mxfp4", group_size=GROUP_SIZE)
    if precision == Q4_1:  # as the file has them
        return ExportOptions(group_size=GROUP_SIZE)
    stored = "int4" if precision == AWQ else precision
    return ExportOptions(precision=stored, group_size=GROUP_SIZE)


def main(folder: Path) -> None:
    """Make what is missing."""
    for family, precision in CASES:
        print(make_artifact(folder, family, precision))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.conformance.make DIR")
    main(Path(sys.argv[1]))
