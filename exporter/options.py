"""What a caller may choose, and what it means for each matrix."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from onnxport.errors import ExportError
from onnxport.exporter.quantize import BlockFormat
from onnxport.graphs import fp4
from onnxport.graphs.manifest import EXPERT_PRECISIONS, PRECISIONS

GROUP_SIZES: Final = (32, 64, 128)
_BITS: Final = {"int4": 4, "int8": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """How to export. Raises ExportError for values that are not allowed.

    `head_precision` is that of the lm_head and of the embedding table, tied or not; "same" is
    `precision`. None chooses int8 for an int4 model, whose logits a 4-bit head would blur most
    for the least gain, and "same" otherwise.

    `precision` None is int4, or what suits a GGUF file, see `settled`. `by_matrix` says that each
    projection has the bits, 4 or 8, that its blocks in the file need, and is set there.

    `group_size` None is that of the checkpoint, where it has weights in integers, in groups that it
    divides, and 128 otherwise.

    `asymmetric` gives blocks of projections in int4 zero points, and scales, that change them less.

    `expert_precision` is that of experts; "same" is `precision`. "mxfp4" keeps what a checkpoint
    has in MXFP4 as it is, and is an error where its experts are anything else.

    `classifier_from_token` are tokens whose logits judge texts: of two, "no" and "yes", the score
    is by how much the second one's is larger; of others each is a label. `score_template` is how
    pairs of texts are written for that: a file in Jinja, or a name of `score_templates.TEMPLATES`.

    `mtp` exports the model's layer of multi-token prediction, too, into a folder of the artifact.
    """

    precision: str | None = None  # of the projections: int4, int8, fp16, fp32
    group_size: int | None = None  # input features that share a scale: 32, 64, 128
    asymmetric: bool = False  # zero points of their own for projections in int4
    head_precision: str | None = None  # same, int4, int8, fp16
    expert_precision: str = "same"  # same, mxfp4
    context_length: int | None = None  # tokens; None: the model's own
    overwrite: bool = False  # replace an older artifact, once the new one is complete
    revision: str | None = None  # branch, tag or commit on the hub
    token: str | bool | None = field(default=None, repr=False)  # hub; None: who is logged in
    tokenizer: Path | None = None  # a folder with the tokenizer's files; None: the checkpoint's
    classifier_from_token: tuple[str, ...] | None = None  # None: what the checkpoint says
    score_template: str | None = None  # likewise
    mtp: bool = False  # see above
    threads: int | None = None  # None: all that this process may use
    by_matrix: bool = False  # see above

    def __post_init__(self) -> None:
        """Check the values."""
        heads = (None, "same", *PRECISIONS)
        for name, value, allowed in (
            ("precision", self.precision, (None, *PRECISIONS)),
            ("group size", self.group_size, (None, *GROUP_SIZES)),
            ("head precision", self.head_precision, heads),
            ("expert precision", self.expert_precision, ("same", *EXPERT_PRECISIONS)),
        ):
            if value not in allowed:
                listed = ", ".join(str(item) for item in allowed if item is not None)
                raise ExportError(f"the {name} {value!r} is not one of {listed}.")
        if self.asymmetric and self.projections != "int4":
            raise ExportError(
                f"asymmetric blocks are of projections in int4, and the precision is "
                f"{self.projections}: leave it out, or use the precision int4."
            )
        if self.by_matrix and self.projections not in _BITS:
            raise ExportError(
                f"bits by matrix are 4 or 8, and the precision is {self.projections}: leave them "
                "out, or use the precision int4 or int8."
            )
        if "fp32" in {self.projections, self.head} and self.head != self.projections:
            raise ExportError(
                f"a head in {self.head} does not go with projections in {self.projections}: fp32 "
                "is all or nothing, for activations have one type. Use the head precision 'same'."
            )

    def settled(self, precision: str, *, by_matrix: bool = False) -> ExportOptions:
        """The same with this precision, where none was asked for, nor blocks that only int4 has."""
        if self.precision is not None or self.asymmetric:
            return self
        return replace(self, precision=precision, by_matrix=by_matrix)

    @property
    def projections(self) -> str:
        """The precision of the projections, settled."""
        return self.precision or "int4"

    @property
    def head(self) -> str:
        """The precision of head and embedding, settled."""
        if self.head_precision is None:
            return "int8" if self.projections == "int4" else self.projections
        return self.projections if self.head_precision == "same" else self.head_precision

    @property
    def keeps_experts(self) -> bool:
        """Whether experts stay in MXFP4."""
        return self.expert_precision != "same"

    @property
    def activation_dtype(self) -> np.dtype[Any]:
        """The type of activations, norms, biases and scales in the graphs."""
        return np.dtype(np.float32 if self.projections == "fp32" else np.float16)

    @property
    def num_threads(self) -> int:
        """Threads to convert with."""
        if self.threads:
            return self.threads
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1  # not every system tells what this process may use

    @property
    def is_quantized(self) -> bool:
        """Whether any matrix is quantized here."""
        return bool({self.projections, self.head} & set(_BITS))

    @property
    def group(self) -> int | None:
        """The group size, settled; None: nothing is quantized."""
        return (self.group_size or GROUP_SIZES[-1]) if self.is_quantized else None

    def block(
        self,
        *,
        head: bool = False,
        experts: bool = False,
        whole: int | None = None,
        bits: int | None = None,
    ) -> BlockFormat | None:
        """How the projections (or the head, or experts) are quantized; None: they are not.

        Args:
            head: of the head and the embedding.
            experts: of experts.
            whole: input features that have no last block which juts out; None: that may be.
            bits: of projections and experts; None: those of the precision.

        Raises:
            ExportError: No group size that is allowed divides `whole`.
        """
        if experts and self.keeps_experts:
            return BlockFormat(fp4.BITS, fp4.BLOCK_SIZE, is_fp4=True)
        if bits is None or head:
            bits = _BITS.get(self.head if head else self.projections)
        if bits is None:
            return None
        sizes = [size for size in GROUP_SIZES if size <= (self.group_size or GROUP_SIZES[-1])]
        fitting = [size for size in sizes if whole is None or whole % size == 0]
        if not fitting:
            raise ExportError(
                f"experts are quantized in groups of {' or '.join(map(str, sizes))} inputs, which "
                f"must divide {whole}, what their two sizes have in common. Use the precision fp16."
            )
        moves = self.asymmetric and bits == _BITS["int4"] and not head and not experts
        return BlockFormat(bits, fitting[-1], is_asymmetric=moves)


def fitting_group(widths: Collection[int]) -> int:
    """The largest group size that divides groups of so many columns, or the smallest there is."""
    fitting = [size for size in GROUP_SIZES if not any(width % size for width in widths)]
    return fitting[-1] if fitting else GROUP_SIZES[0]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an export is."""

    done_bytes: int  # of the checkpoint
    total_bytes: int
    stage: str  # what is being done, for people


ProgressCallback = Callable[[Progress], None]
