"""Export a draft head: what a model's states become the guesses of."""

from __future__ import annotations

import io
import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import CheckpointError, ExportError
from onnxport.exporter import golden
from onnxport.exporter.checkpoint import Checkpoint
from onnxport.exporter.config import Config
from onnxport.exporter.families import eagle3, find_family
from onnxport.exporter.gguf.parts import is_gguf
from onnxport.exporter.hub import CheckpointFolder, fetch_weights, find_checkpoint
from onnxport.exporter.options import ExportOptions, ProgressCallback
from onnxport.exporter.paged_graph import paged_graph
from onnxport.exporter.plan import WeightPlan, check_unused, plan_weights, unused_tensors
from onnxport.exporter.progress import advance_through
from onnxport.exporter.sizes import artifact_bytes
from onnxport.exporter.source import TOKENIZER_FILES, SpecialTokens, check_tokenizer, special_tokens
from onnxport.exporter.weights import StreamingWeights
from onnxport.graphs.artifact_writer import ArtifactWriter, check_destination
from onnxport.graphs.manifest import DRAFT_TOKENS, Manifest, Source
from onnxport.graphs.spec import ArchSpec

logger = logging.getLogger(__name__)


def export_head(
    source: str | Path,
    target: str | Path,
    destination: str | Path,
    options: ExportOptions | None = None,
    progress: ProgressCallback | None = None,
) -> Path:
    """Export a draft head as an artifact folder, which appears complete or not at all.

    Args:
        source: A folder with `config.json` and safetensors weights of an EAGLE-3 head, or a hub id.
        target: The checkpoint of the model that it guesses for, likewise.
        destination: The folder to make.
        options: How; None: int4 in groups of 128. `revision` is the head's.
        progress: Called as the checkpoint is read, on the calling thread.

    Returns:
        The artifact's folder: a paged graph, its weights, the tokens that its logits are of, and
        the tokenizer of the model.

    Raises:
        UnsupportedModelError: `source` is no such head, or a configuration key or value of the two
            is not supported.
        CheckpointError: A checkpoint is missing or corrupt, or the two do not belong together.
        ExportError: An option is not allowed, the destination exists, or the disk is full.
    """
    options = options or ExportOptions()
    check_destination(destination, overwrite=options.overwrite)
    folder = find_checkpoint(source, revision=options.revision, token=options.token)
    if is_gguf(folder.path):
        raise ExportError(
            f"--target was given, and {folder.path} is a GGUF file, in which no draft head is "
            "read. Leave the target out, or give the head's original checkpoint."
        )
    if options.tokenizer is not None:
        raise ExportError("a draft head has the tokenizer of its target: leave --tokenizer out.")
    if options.classifier_from_token is not None or options.score_template is not None:
        raise ExportError(
            "a draft head judges no texts: leave --classifier-from-token and --score-template out."
        )
    config = Config.read(folder.path)
    if not eagle3.is_head(config):
        raise ExportError(
            f"--target was given, and {folder.path} is no draft head, which alone needs a target: "
            f"its architectures are {list(config.architectures)}. Leave the target out."
        )
    if options.mtp:
        raise ExportError("a draft head has no layer of multi-token prediction: leave --mtp out.")
    if options.keeps_experts:
        raise ExportError("the expert precision mxfp4 was asked for, and this head has no experts.")
    model = find_checkpoint(target, token=options.token)
    if is_gguf(model.path):
        raise ExportError(
            f"{model.path} is a GGUF file; give the original checkpoint of the model that the head "
            "was trained for."
        )
    model_config = Config.read(model.path)
    if eagle3.is_head(model_config):
        raise ExportError(f"{model.path} is a draft head; give the model that heads guess for.")
    family = find_family(model_config)
    spec = eagle3.read_spec(config, family.spec(model_config, None), options.context_length)
    check_tokenizer(model.path)
    special = special_tokens(model.path, spec.vocab_size)
    folder = fetch_weights(folder, token=options.token)
    with ExitStack() as stack:
        checkpoint = stack.enter_context(Checkpoint.open(folder.path))
        names = eagle3.tensor_names(checkpoint.names)
        if names.embedding not in checkpoint.names:
            model = fetch_weights(model, token=options.token)
            theirs = stack.enter_context(Checkpoint.open(model.path))
            embedding = family.names_in(theirs.names).embedding
            if embedding not in theirs.names:
                raise CheckpointError(
                    f"neither {folder.path} nor {model.path} holds an embedding: the first lacks "
                    f"{names.embedding}, the second {embedding}."
                )
            # As it is stored, whatever the model does to its rows: vLLM lets heads share it so.
            checkpoint.adopt(theirs, embedding, names.embedding)
        plan = plan_weights(spec, names)
        checkpoint.require(plan.shapes())
        check_unused(unused_tensors(checkpoint.names, plan, names, tied=False), spec.family)
        tokens = draft_tokens(checkpoint, spec)
        manifest = _manifest(spec, options, special, folder)
        head = DraftHead(plan, tokens, manifest, model.path)
        return write_head(head, checkpoint, Path(destination), options, progress)


@dataclass(frozen=True, slots=True)
class DraftHead:
    """A head to write, all of it read but the weights."""

    plan: WeightPlan
    tokens: NDArray[np.int32]  # [logits], the token of each
    manifest: Manifest
    files: Path  # a folder with the tokenizer's


def write_head(
    head: DraftHead,
    checkpoint: Checkpoint,
    destination: Path,
    options: ExportOptions,
    progress: ProgressCallback | None,
) -> Path:
    """Write a head's artifact, whose tensors were checked, and return its folder.

    Raises:
        CheckpointError: A weight is damaged.
        ExportError: The destination exists, or the disk is full.
    """
    spec, plan = head.manifest.model, head.plan
    with ArtifactWriter(
        destination,
        overwrite=options.overwrite,
        expected_bytes=artifact_bytes(spec, plan, checkpoint, options),
    ) as writer:
        advance = advance_through(checkpoint, plan, progress)
        with StreamingWeights(spec, plan, checkpoint, writer, options, advance) as weights:
            writer.write_bytes(golden.FILE, golden.make_draft_golden(spec, weights))
        writer.write_graph("paged", paged_graph(spec, weights.stored))
        buffer = io.BytesIO()
        np.save(buffer, head.tokens)
        writer.write_bytes(DRAFT_TOKENS, buffer.getvalue())
        for name in TOKENIZER_FILES:
            if (head.files / name).is_file():
                writer.copy_file(head.files / name)
        moved = weights.stored.have_zero_points or None
        return writer.commit(replace(head.manifest, zero_points=moved))


def draft_tokens(checkpoint: Checkpoint, spec: ArchSpec) -> NDArray[np.int32]:
    """Return the token of each logit, int32 [logits].

    Raises:
        CheckpointError: the checkpoint does not say, or contradicts itself.
    """
    count, vocab = spec.num_logits, spec.vocab_size
    every = np.arange(count, dtype=np.int64)
    tokens = every
    if eagle3.OFFSETS in checkpoint.names:
        offsets = checkpoint.read_plain(eagle3.OFFSETS, "I64")
        if offsets.shape != (count,):
            raise CheckpointError(
                f"{eagle3.OFFSETS} is {list(offsets.shape)}, and draft_vocab_size is {count}."
            )
        tokens = every + offsets
    elif count != vocab:
        raise CheckpointError(
            f"the head has {count} logits for {vocab} tokens, and the checkpoint lacks "
            f"{eagle3.OFFSETS}, which says of which ones."
        )
    if tokens.min() < 0 or tokens.max() >= vocab or len(np.unique(tokens)) < count:
        raise CheckpointError(
            f"{eagle3.OFFSETS} does not give each of {count} logits a token of its own, of {vocab}."
        )
    if eagle3.HAVE_LOGITS in checkpoint.names:
        told = checkpoint.read_plain(eagle3.HAVE_LOGITS, "BOOL")
        if told.shape != (vocab,) or not np.array_equal(np.flatnonzero(told), np.sort(tokens)):
            raise CheckpointError(
                f"{eagle3.HAVE_LOGITS} and {eagle3.OFFSETS} name other tokens; download the head "
                "again."
            )
    return tokens.astype(np.int32)


def _manifest(
    spec: ArchSpec, options: ExportOptions, tokens: SpecialTokens, folder: CheckpointFolder
) -> Manifest:
    return Manifest(
        model=spec,
        precision=options.projections,
        group_size=options.group,
        head_precision=options.head,
        activation_dtype=options.activation_dtype.name,
        source=Source(folder.name, folder.revision),
        eos_token_ids=tokens.eos,
        bos_token_id=tokens.bos,
        pad_token_id=tokens.pad,
    )
