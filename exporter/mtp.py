"""The layer of multi-token prediction that a checkpoint holds: a draft head of its own model."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from onnxport.errors import CheckpointError, ExportError, UnsupportedModelError
from onnxport.exporter.checkpoint import Checkpoint
from onnxport.exporter.draft_head import DraftHead
from onnxport.exporter.families import FAMILIES
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.options import ExportOptions
from onnxport.exporter.plan import (
    EMBEDDING,
    HEAD,
    WeightPlan,
    check_unused,
    plan_weights,
    unused_tensors,
)
from onnxport.exporter.sizes import artifact_bytes
from onnxport.graphs.draft_spec import DraftSpec
from onnxport.graphs.manifest import Manifest
from onnxport.graphs.spec import ArchSpec

_ASKED: Final = (
    "the layer of multi-token prediction was asked for (--mtp, or the speculation method mtp)"
)
_LAYER: Final = re.compile(r"layers\.\d+\.")

logger = logging.getLogger(__name__)


def check_generates(*, generates: bool) -> None:
    """Raise ExportError where the layer is asked for of a model that generates no text."""
    if not generates:
        raise ExportError(
            f"{_ASKED}, and the checkpoint has no head that generates text, so there are no tokens "
            "to guess. Leave it out."
        )


def check_options(options: ExportOptions, *, is_gguf: bool) -> None:
    """Raise ExportError where the layer is asked for and cannot be had, whatever the model is."""
    if not options.mtp:
        return
    if is_gguf:
        raise ExportError(
            f"{_ASKED}, which is not read of a GGUF file. Leave it out, or give the model's "
            "original checkpoint."
        )
    if options.keeps_experts:
        raise ExportError(f"{_ASKED}, whose experts cannot stay in MXFP4. Leave out one of both.")


def check_family(family: Family) -> None:
    """Raise UnsupportedModelError where such layers of a family are not read."""
    if family.mtp is None:
        known = ", ".join(sorted({one.architecture for one in FAMILIES if one.mtp is not None}))
        raise UnsupportedModelError(
            f"{_ASKED}, which is not read of a {family.architecture}. It is of: {known}. Leave it "
            "out; any model can be guessed for by other means (docs/speculation.md)."
        )


def plan_mtp(
    family: Family,
    names: TensorNames,
    checkpoint: Checkpoint,
    manifest: Manifest,
    files: Path,
) -> DraftHead:
    """Describe the layer that guesses for a model, and check its tensors.

    Args:
        family: The model's.
        names: Of the model's tensors.
        checkpoint: Of both.
        manifest: The model's, of which the head's differs in its `model` alone.
        files: A folder with the tokenizer's.

    Raises:
        CheckpointError: The checkpoint lacks the layer, or holds something that nothing reads.
    """
    assert family.mtp is not None, "check_family was not asked"
    spec, found = manifest.model, checkpoint.names
    own = _with_its_experts(family.mtp(names, spec.num_layers, found), family, found)
    product = f"{own.features}.weight"
    if product not in found:
        raise CheckpointError(
            f"{_ASKED}, and the checkpoint holds none: it has no {product}. Leave it out, or give "
            "the checkpoint that the model's authors published, for others often lack the layer."
        )
    own, tied = _shared(own, names, spec, found)
    head = _spec(spec, tied=tied, has_experts=_has_experts(own, found))
    plan = plan_weights(head, own)
    checkpoint.require(plan.shapes())
    unused = unused_tensors(found, plan, replace(own, further=()), tied=tied)
    _check_rest(own, [one for one in unused if one.startswith(names.further)], spec)
    tokens = np.arange(head.vocab_size, dtype=np.int32)
    return DraftHead(plan, tokens, replace(manifest, model=head), files)


def head_bytes(
    head: DraftHead,
    spec: ArchSpec,
    plan: WeightPlan,
    checkpoint: Checkpoint,
    options: ExportOptions,
) -> int:
    """About how large the layer's weights become, without those that are stored as the model's.

    Args:
        head: What `plan_mtp` returned.
        spec: The model's.
        plan: Of the model's weights.
        checkpoint: Of both.
        options: Of both.
    """
    ours = head.manifest.model
    roles = (
        (EMBEDDING, HEAD) if ours.tie_word_embeddings == spec.tie_word_embeddings else (EMBEDDING,)
    )
    shared = {one for one in roles if head.plan.matrices[one] == plan.matrices[one]}
    return artifact_bytes(ours, head.plan, checkpoint, options, without=shared)


def _with_its_experts(own: TensorNames, family: Family, found: frozenset[str]) -> TensorNames:
    """The names with those of the layer's experts, which may be stored otherwise than the model's.

    So it is where only one of both is quantized, for that is done expert by expert.
    """
    for layout in (own, *family.layouts):
        first = own.layer.format(0) + layout.expert_gate_up[0].format(0)
        if any(name.startswith(first) for name in found):
            return replace(
                own, expert_gate_up=layout.expert_gate_up, expert_down=layout.expert_down
            )
    return own


def _shared(
    own: TensorNames, names: TensorNames, spec: ArchSpec, found: frozenset[str]
) -> tuple[TensorNames, bool]:
    """The names, the model's for what the layer has not itself, and whether the head is tied."""
    has_embedding, has_head = own.embedding in found, own.head in found
    tied = spec.tie_word_embeddings and not has_embedding and not has_head
    embedding = own.embedding if has_embedding else names.embedding
    model_head = names.embedding if spec.tie_word_embeddings else names.head
    return replace(own, embedding=embedding, head=own.head if has_head else model_head), tied


def _has_experts(own: TensorNames, found: frozenset[str]) -> bool:
    return f"{own.layer.format(0)}{own.router}.weight" in found


def _spec(spec: ArchSpec, *, tied: bool, has_experts: bool) -> ArchSpec:
    """One layer like the model's, with attention, that reads what the model's final norm makes."""
    assert not any(spec.sliding_window), "nobody says what such a layer sees"
    assert spec.rotated_layers is None, "nor what rotates in it"
    draft = DraftSpec(
        vocab_size=spec.vocab_size,
        target_hidden_size=spec.hidden_size,
        target_num_layers=spec.num_layers,
        target_layers=(),
        norm_before_residual=False,
        joint_norm=False,
        apart_norm=False,
        norm_output=True,
    )
    experts = replace(spec.experts, layers=None) if spec.experts and has_experts else None
    return replace(
        spec,
        num_layers=1,
        sliding_window=(None,),
        linear=None,
        experts=experts,
        tie_word_embeddings=tied,
        draft=draft,
    )


def _check_rest(own: TensorNames, unused: list[str], spec: ArchSpec) -> None:
    """Refuse what a layer has besides, and tell of layers behind it, of which nothing is read."""
    first = own.layer.format(0)
    others = [one for one in unused if _LAYER.search(one) and not one.startswith(first)]
    rest = [one for one in unused if one not in others]
    check_unused(rest, f"{spec.family} layer of multi-token prediction in a")
    if others:
        logger.warning(
            "%d tensors are left out, such as %s, of layers behind the first one of multi-token "
            "prediction; that one guesses all tokens",
            *(len(others), others[0]),
        )
