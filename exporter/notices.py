"""What is told of an export: what the artifact lacks, and what of the checkpoint it changes."""

from __future__ import annotations

import logging
from pathlib import Path

from onnxport.exporter import genai
from onnxport.exporter.checkpoint import MXFP4, Checkpoint
from onnxport.exporter.formats import Formats
from onnxport.exporter.gguf.parts import is_gguf
from onnxport.exporter.hub import CheckpointFolder
from onnxport.exporter.options import ExportOptions
from onnxport.exporter.plan import WeightPlan
from onnxport.exporter.plan_experts import EXPERTS
from onnxport.exporter.plan_parts import MatrixPlan
from onnxport.exporter.source import END, TOKENIZER_FILES, SpecialTokens
from onnxport.exporter.weights import StreamingWeights
from onnxport.graphs.attention_ops import ROTARY_MULTIPLE
from onnxport.graphs.manifest import GRAPH_FILES
from onnxport.graphs.spec import ArchSpec

logger = logging.getLogger(__name__)


def tell_lacks(
    folder: CheckpointFolder, files: Path, spec: ArchSpec, tokens: SpecialTokens
) -> None:
    """Say what an artifact will not be good for, by what checkpoint and model lack."""
    if not (files / TOKENIZER_FILES[0]).is_file():
        advice = (
            "name the folder of the model's own with --tokenizer"
            if is_gguf(folder.path)
            else "transformers makes one of a tokenizer.model, or of vocab.json and merges.txt: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
        logger.warning(
            "%s has no %s, so the artifact will take token ids only; %s",
            *(folder.path, TOKENIZER_FILES[0], advice),
        )
    if not tokens.eos:
        logger.warning(
            "%s names no token that ends texts, nor does its tokenizer, so each goes on to its "
            "max_tokens; a generation_config.json beside the tokenizer, with %s, tells some",
            *(folder.path, END),
        )
    if not spec.has_gqa_graph:
        logger.warning(
            "the artifact will have no %s, and no %s for onnxruntime-genai: %s. onnxport itself "
            "serves the paged graph",
            *(GRAPH_FILES["gqa"], genai.FILE, _why_no_gqa_graph(spec)),
        )
    elif spec.head_size % ROTARY_MULTIPLE or spec.rope.rotary_dim % ROTARY_MULTIPLE:
        logger.warning(
            "%s, and so onnxruntime-genai, will not run in ONNX Runtime: its GroupQueryAttention "
            "takes multiples of %d channels, and this model's heads have %d, of which %d rotate. "
            "onnxport itself serves the paged graph",
            *(GRAPH_FILES["gqa"], ROTARY_MULTIPLE, spec.head_size, spec.rope.rotary_dim),
        )


def _why_no_gqa_graph(spec: ArchSpec) -> str:
    if spec.latent is not None:
        return "ONNX Runtime's GroupQueryAttention has no attention of latents"
    if spec.has_channel_decays:
        return "decays of each channel are written for the paged graph alone"
    if spec.has_mixed_layers:
        return (
            "it knows one size of heads, and keys and values of each layer, and this model's "
            "layers have several, or read those of others"
        )
    if spec.value_size is not None:
        return "it knows one size of keys and values, and this model's values are narrower"
    if spec.has_ungated_experts:
        return "ONNX Runtime knows no experts without a gate, which this model's are"
    if spec.chunked_windows:
        return "its GroupQueryAttention has no attention in chunks; a context of one chunk has none"
    assert spec.has_gelu_experts
    return "ONNX Runtime's MoE and QMoE have no gated GELU, which this model's experts have"


def has_gqa_graph(spec: ArchSpec, formats: Formats) -> bool:
    """Whether there is one; says so where there is none for what experts keep."""
    if not (spec.has_gqa_graph and formats.have_own_experts):
        return spec.has_gqa_graph
    logger.warning(
        "the artifact will have no %s, and no %s for onnxruntime-genai: experts keep the minima of "
        "their blocks, or the bits of each matrix, which ONNX Runtime's QMoE does not compute. "
        "onnxport itself serves the paged graph; with --precision int8 there are both",
        *(GRAPH_FILES["gqa"], genai.FILE),
    )
    return False


def tell_kept(weights: StreamingWeights, options: ExportOptions) -> None:
    """Say how much of what was in integers is stored as it was."""
    count, kept = weights.integer_blocks, weights.kept_blocks
    if kept < count:
        logger.warning(
            "of %d blocks of integers %d (%.1f %%) could not stay as they are, and were quantized "
            "again, to %s in groups of %d, which changes them: %s",
            *(
                count,
                count - kept,
                100 * (count - kept) / count,
                options.projections,
                options.group,
            ),
            "their bits or groups are other ones, or a head or experts have zero points"
            + (". The precision int8 changes them less" if options.projections == "int4" else ""),
        )
    elif count:
        logger.info("all %d blocks of integers are stored as they are", count)


def tell_mxfp4(checkpoint: Checkpoint, plan: WeightPlan, options: ExportOptions) -> None:
    """Say that experts change which need not. Eight bits have room for them where blocks stay."""
    types = expert_dtypes(checkpoint, plan)
    stay = options.projections == "int8" and types.keys() <= checkpoint.packed_matrices.keys()
    if {*types.values()} == {MXFP4} and not stay:
        logger.warning(
            "experts are stored in MXFP4 and are quantized again, to %s, which changes them; "
            "the expert precision mxfp4 keeps them as they are",
            options.projections,
        )


def tell_requantized(
    checkpoint: Checkpoint, plan: WeightPlan, formats: Formats, options: ExportOptions
) -> None:
    """Say what of a checkpoint was quantized, and is quantized again."""
    types = checkpoint.requantized
    bits = {
        part.tensor: block.bits
        for role, matrix in plan.matrices.items()
        if (block := formats.block(role)) is not None
        for part in matrix.parts
        if part.tensor in types
        and not (formats.has_offsets(role) and part.tensor in checkpoint.with_minima)
    }
    if bits:
        targets = sorted({f"int{one}" for one in bits.values()})
        logger.warning(
            "matrices are stored in %s, %d of them, whose blocks an artifact has not in their "
            "place; they are quantized again, to %s in groups of %d, which changes them%s",
            *(", ".join(sorted({types[name] for name in bits})), len(bits)),
            *(" and ".join(targets), options.group),
            ". The precision int8 changes them less" if "int4" in targets else " by little",
        )


def experts_of(plan: WeightPlan) -> list[MatrixPlan]:
    """The matrices of experts."""
    return [one for role, one in plan.matrices.items() if role.endswith(EXPERTS)]


def expert_dtypes(checkpoint: Checkpoint, plan: WeightPlan) -> dict[str, str]:
    """What each tensor of experts is stored in."""
    tensors = sorted({part.tensor for one in experts_of(plan) for part in one.parts})
    return {name: checkpoint.dtype(name) for name in tensors}
