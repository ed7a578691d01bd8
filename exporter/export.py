"""Export a checkpoint: config → weights → family → graph → quantize → artifact."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from onnxport.errors import CheckpointError, ExportError
from onnxport.exporter import genai, golden
from onnxport.exporter.checkpoint import MXFP4, Checkpoint, to_float32
from onnxport.exporter.classification import (
    SCORE_TENSOR,
    ScoreHead,
    read_score_head,
)
from onnxport.exporter.config import Config
from onnxport.exporter.draft_head import DraftHead, write_head
from onnxport.exporter.embedding import embeds_only
from onnxport.exporter.families import find_family
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.families.eagle3 import is_head
from onnxport.exporter.formats import Formats
from onnxport.exporter.gguf.parts import is_gguf
from onnxport.exporter.gqa_graph import gqa_graph
from onnxport.exporter.hub import CheckpointFolder, find_checkpoint
from onnxport.exporter.mtp import (
    check_family,
    check_generates,
    check_options,
    head_bytes,
    plan_mtp,
)
from onnxport.exporter.notices import (
    expert_dtypes,
    experts_of,
    has_gqa_graph,
    tell_kept,
    tell_lacks,
    tell_mxfp4,
    tell_requantized,
)
from onnxport.exporter.options import ExportOptions, ProgressCallback, fitting_group
from onnxport.exporter.origin import DEFAULT_PRECISION, Origin, open_origin
from onnxport.exporter.paged_graph import paged_graph
from onnxport.exporter.plan import WeightPlan, check_unused, plan_weights, unused_tensors
from onnxport.exporter.progress import advance_through
from onnxport.exporter.shard import DTYPES
from onnxport.exporter.sizes import artifact_bytes
from onnxport.exporter.source import (
    END,
    TEMPLATE_FOLDER,
    TOKENIZER_FILES,
    SpecialTokens,
    check_fits,
    check_tokenizer,
    named_ids,
    read_json,
    special_tokens,
)
from onnxport.exporter.weights import StreamingWeights
from onnxport.graphs.artifact_writer import ArtifactWriter, check_destination
from onnxport.graphs.classification_spec import (
    SCORE_FILE,
    SCORE_TEMPLATE_FILE,
    dump_score_head,
)
from onnxport.graphs.embedding_spec import EmbeddingSpec
from onnxport.graphs.manifest import GRAPH_FILES, MTP_FOLDER, Manifest, Source
from onnxport.graphs.spec import ArchSpec

_COMPARE_ROWS = 4096

logger = logging.getLogger(__name__)


def export_model(
    source: str | Path,
    destination: str | Path,
    options: ExportOptions | None = None,
    progress: ProgressCallback | None = None,
) -> Path:
    """Export a checkpoint as an artifact folder, which appears complete or not at all.

    Args:
        source: A folder with `config.json` and safetensors weights, a GGUF file (of a split one the
            first), or a hub id.
        destination: The folder to make.
        options: How; None: int4 in groups of 128, or what keeps most of quantized weights.
        progress: Called as the checkpoint is read, on the calling thread.

    Returns:
        The artifact's folder.

    Raises:
        UnsupportedModelError: An architecture, configuration key or value that is not supported.
        CheckpointError: The checkpoint is missing, corrupt or contradicts its configuration.
        ExportError: An option is not allowed, the destination exists, or the disk is full.
    """
    options = options or ExportOptions()
    check_destination(destination, overwrite=options.overwrite)
    folder = find_checkpoint(source, revision=options.revision, token=options.token)
    check_options(options, is_gguf=is_gguf(folder.path))
    with open_origin(folder) as origin:
        config = origin.config
        if is_head(config):
            raise ExportError(
                f"{folder.path} is a draft head, which needs the model that it guesses for: name "
                "its checkpoint with --target (in Python: export_head)."
            )
        family = find_family(config)
        if options.mtp:
            check_family(family)
        spec = family.spec(config, options.context_length)
        further = range(spec.num_layers, spec.num_layers + family.count_further_layers(config))
        origin.check_weights()
        embedding = origin.embedding(spec)
        files = origin.files() if options.tokenizer is None else Path(options.tokenizer)
        check_tokenizer(files)
        score = read_score_head(
            config,
            folder.path,
            files,
            spec,
            options.classifier_from_token,
            options.score_template,
        )
        if score is None and "rerank" in folder.name.lower():
            logger.warning(
                "%s is exported as a model that generates text. If it judges pairs of texts by the "
                "logits of two tokens, name these: --classifier-from-token no,yes",
                folder.name,
            )
        config.check_all_used(family.name)
        if options.tokenizer is not None:
            check_fits(files, spec.vocab_size)
        tokens = _tokens(origin, files, spec.vocab_size)
        tell_lacks(folder, files, spec, tokens)
        options = options.settled(origin.precision, by_matrix=origin.is_mixed)
        with origin.open(spec, options.token) as checkpoint:
            names = origin.names(family, checkpoint)
            names = replace(names, further=(*names.further, *map(names.layer.format, further)))
            if family.head_tells and not config.has("tie_word_embeddings"):
                spec = replace(spec, tie_word_embeddings=names.head not in checkpoint.names)
            if family.correction_tells:
                spec = _as_corrected(spec, names, checkpoint)
            if score is not None and not score.generates:
                spec = _without_head(spec)
                logger.warning(
                    "%s has a score head in place of another, so the artifact judges texts and "
                    "generates none",
                    folder.path,
                )
            elif embeds_only(config, embedding, spec, names, checkpoint.names):
                if score is not None:
                    raise ExportError(
                        f"{folder.path} has no head, of which a score head of tokens "
                        f"({', '.join(score.spec.labels)}) would have rows; export a checkpoint "
                        "with a head, or leave out --classifier-from-token."
                    )
                spec = _without_head(spec)
                embedding = replace(embedding or EmbeddingSpec(), only=True)
                logger.warning(
                    "%s has no head, so the artifact embeds texts and generates none", folder.path
                )
            job = _Job(folder, files, family, spec, names, tokens, config, embedding, score)
            return _export(job, checkpoint, Path(destination), options, progress)


def _as_corrected(spec: ArchSpec, names: TensorNames, checkpoint: Checkpoint) -> ArchSpec:
    """The model, whose scores of experts choose as they are where no vector corrects them."""
    if spec.experts is None or any(one.endswith(names.correction) for one in checkpoint.names):
        return spec
    return replace(spec, experts=replace(spec.experts, corrected=None))


def _without_head(spec: ArchSpec) -> ArchSpec:
    """A model whose logits nobody reads: the graphs make some of its embedding."""
    return replace(spec, tie_word_embeddings=True, head_bias=None)


@dataclass(frozen=True, slots=True)
class _Job:
    """What is exported, all of it read but the weights."""

    folder: CheckpointFolder
    files: Path  # a folder with the tokenizer's
    family: Family
    spec: ArchSpec
    names: TensorNames
    tokens: SpecialTokens
    config: Config
    embedding: EmbeddingSpec | None
    score: ScoreHead | None


def _export(
    job: _Job,
    checkpoint: Checkpoint,
    destination: Path,
    options: ExportOptions,
    progress: ProgressCallback | None,
) -> Path:
    """Check the tensors, and write the artifact."""
    spec = job.spec
    if options.group_size is None:
        options = replace(options, group_size=fitting_group(checkpoint.group_widths))
    plan = plan_weights(spec, job.names)
    _check_tensors(checkpoint, plan, job, mtp=options.mtp)
    formats = Formats(plan, options, checkpoint)
    options = formats.settled()
    formats = Formats(plan, options, checkpoint)
    head = None if job.score is None else job.score.read(checkpoint, job.names, spec)
    mtp = _mtp_head(job, checkpoint, options) if options.mtp else None
    if options.keeps_experts:
        _check_kept(checkpoint, plan, job.config)
    elif options.block():
        tell_mxfp4(checkpoint, plan, options)
    tell_requantized(checkpoint, plan, formats, options)
    expected_bytes = artifact_bytes(spec, plan, checkpoint, options)
    if mtp is not None:
        expected_bytes += head_bytes(mtp, spec, plan, checkpoint, options)
    with ArtifactWriter(
        destination, overwrite=options.overwrite, expected_bytes=expected_bytes
    ) as writer:
        if mtp is not None:
            write_head(mtp, checkpoint, writer.inside(MTP_FOLDER), options, progress)
            writer.share(MTP_FOLDER)
        advance = advance_through(checkpoint, plan, progress)
        with StreamingWeights(spec, plan, checkpoint, writer, options, advance) as weights:
            writer.write_bytes(golden.FILE, golden.make_golden(spec, weights))
        tell_kept(weights, options)
        writer.write_graph("paged", paged_graph(spec, weights.stored))
        _write_small_files(writer, job.files)
        if has_gqa_graph(spec, formats):
            writer.write_graph("gqa", gqa_graph(spec, weights.stored))
            _write_genai_config(writer, job)
        if head is not None and job.score is not None:
            writer.write_bytes(SCORE_FILE, dump_score_head(head))
            if job.score.template is not None:
                writer.write_bytes(SCORE_TEMPLATE_FILE, job.score.template.encode())
        manifest = _manifest(spec, options, job.tokens, job.folder)
        judged = None if job.score is None else job.score.spec
        return writer.commit(
            replace(
                manifest,
                zero_points=weights.stored.have_zero_points or None,
                offsets=weights.stored.have_offsets or None,
                int8_matrices=formats.num_wider() or None,
                embedding=job.embedding,
                classification=judged,
            )
        )


def _mtp_head(job: _Job, checkpoint: Checkpoint, options: ExportOptions) -> DraftHead:
    """The model's layer of multi-token prediction, which a model that generates no text has not."""
    judges = job.score is not None and not job.score.generates
    embeds = job.embedding is not None and job.embedding.only
    check_generates(generates=not judges and not embeds)
    manifest = _manifest(job.spec, options, job.tokens, job.folder)
    return plan_mtp(job.family, job.names, checkpoint, manifest, job.files)


def settled_options(folder: CheckpointFolder, options: ExportOptions) -> ExportOptions:
    """The options with the precision that an export of a checkpoint has where none is asked for.

    Raises:
        CheckpointError: It cannot be read.
        UnsupportedModelError: A GGUF file of a model that is not supported.
    """
    if options.precision is not None or not is_gguf(folder.path):
        return options.settled(DEFAULT_PRECISION)
    with open_origin(folder) as origin:
        return options.settled(origin.precision, by_matrix=origin.is_mixed)


def _tokens(origin: Origin, files: Path, vocab_size: int) -> SpecialTokens:
    """The special tokens, of which a tokenizer's folder may name no ends, but the model itself."""
    if named_ids(files, END):
        return special_tokens(files, vocab_size)
    ends = origin.ends(vocab_size)
    if ends:
        logger.info("the tokenizer's files name no token that ends texts; the model %s", list(ends))
    return special_tokens(files, vocab_size, ends)


def _check_tensors(checkpoint: Checkpoint, plan: WeightPlan, job: _Job, *, mtp: bool) -> None:
    spec, names = job.spec, job.names
    checkpoint.require(plan.shapes())
    unused = unused_tensors(checkpoint.names, plan, names, tied=spec.tie_word_embeddings)
    if job.score is not None and not job.score.generates:
        unused = [name for name in unused if name != SCORE_TENSOR]
    check_unused([name for name in unused if not _is_zero_bias(checkpoint, name)], spec.family)
    advice = "" if job.family.mtp is None else "; --mtp exports it, too"
    for prefixes, what in (
        (names.images, "the part that reads images: the artifact takes text alone"),
        (() if mtp else names.further, f"what guesses tokens behind the next one{advice}"),
    ):
        if left := sorted(name for name in checkpoint.names if name.startswith(prefixes)):
            logger.warning(
                "%d tensors are left out (%.2f GB, such as %s) of %s",
                *(len(left), sum(map(checkpoint.size_bytes, left)) / 1e9, left[0], what),
            )
    if spec.tie_word_embeddings and names.head in checkpoint.names:
        _check_same(checkpoint, names.embedding, names.head, spec)


def _is_zero_bias(checkpoint: Checkpoint, name: str) -> bool:
    """Whether it is zeros beside a matrix in integers, which older GPTQ checkpoints have."""
    matrix = name.removesuffix("bias") + "weight"
    if not name.endswith(".bias") or matrix not in checkpoint.packed_matrices:
        return False
    return checkpoint.dtype(name) in DTYPES and not checkpoint.read(name).any()


def _check_kept(checkpoint: Checkpoint, plan: WeightPlan, config: Config) -> None:
    """Experts that are to stay in MXFP4 are in it, as they are to be stored."""
    asked = f"{config.path}: the expert precision mxfp4 was asked for"
    found = expert_dtypes(checkpoint, plan)
    if not found:
        raise ExportError(f"{asked}, and this model has no experts; leave it out.")
    others = [name for name, dtype in found.items() if dtype != MXFP4]
    if others:
        raise ExportError(
            f"{asked}, which keeps what is stored so, and {len(others)} of {len(found)} tensors "
            f"of experts are not: {others[0]} is {found[others[0]]}. Leave it out, and "
            "experts are of the precision that the rest has."
        )
    if any(one.part_scales is not None for one in experts_of(plan)):
        raise ExportError(
            f"{asked}, and each expert of this model is multiplied with a number of its own, which "
            "goes into its weights. Leave it out."
        )
    assert all(one.scale == 1 for one in experts_of(plan))
    logger.warning(
        "onnxruntime-genai will not run %s on a processor: ONNX Runtime has no kernel for experts "
        "in MXFP4 there. onnxport itself serves the paged graph",
        GRAPH_FILES["gqa"],
    )


def _check_same(checkpoint: Checkpoint, first: str, second: str, spec: ArchSpec) -> None:
    """A tied head may be stored twice, in another type, too, but not with other numbers."""
    checkpoint.require({second: (spec.vocab_size, spec.token_size)})
    for start in range(0, spec.vocab_size, _COMPARE_ROWS):
        stop = min(start + _COMPARE_ROWS, spec.vocab_size)
        ours, theirs = (
            to_float32(checkpoint.read_rows(name, start, stop)) for name in (first, second)
        )
        if not np.array_equal(ours, theirs, equal_nan=True):
            raise CheckpointError(
                f"config.json ties the head to the embedding, and the checkpoint's {second} "
                f"({checkpoint.dtype(second)}) does not hold the numbers of {first} "
                f"({checkpoint.dtype(first)}). Set tie_word_embeddings to false to use the head "
                f"as it is, or remove {second}."
            )


def _write_small_files(writer: ArtifactWriter, folder: Path) -> None:
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            writer.copy_file(folder / name)
    for template in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja")):
        writer.copy_file(template, f"{TEMPLATE_FOLDER}/{template.name}")


def _write_genai_config(writer: ArtifactWriter, job: _Job) -> None:
    """Only where there is a graph that onnxruntime-genai would look for."""
    generation = read_json(job.files / "generation_config.json")
    config = genai.genai_config(job.spec, job.tokens, generation)
    writer.write_bytes(genai.FILE, genai.dumps(config))


def _manifest(
    spec: ArchSpec, options: ExportOptions, tokens: SpecialTokens, folder: CheckpointFolder
) -> Manifest:
    return Manifest(
        model=spec,
        precision=options.projections,
        group_size=options.group,
        head_precision=options.head,
        expert_precision=options.expert_precision if options.keeps_experts else None,
        activation_dtype=options.activation_dtype.name,
        source=Source(folder.name, folder.revision),
        eos_token_ids=tokens.eos,
        bos_token_id=tokens.bos,
        pad_token_id=tokens.pad,
    )
