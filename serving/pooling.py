"""Pooling: one vector of what the model makes of a prompt's tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import CapacityError, RequestError
from onnxport.graphs.embedding_spec import Dimensions, EmbeddingSpec, Pooling, Similarity
from onnxport.serving.truncation import SIDES, Side, check_truncation

if TYPE_CHECKING:
    from onnxport.serving.request import Request
    from onnxport.serving.step_plan import StepPlan

Floats = NDArray[np.float32]

# What vLLM does where neither checkpoint nor user say.
DEFAULT_POOLING: Final[Pooling] = "last"
DEFAULT_NORMALIZED: Final = True
CUT_SIDE: Final[Side] = "right"  # as vLLM of pooling models, and sentence-transformers
Norm = int | Literal["int16"]
EUCLIDEAN: Final = 2
MOST_ORDER: Final = 2**31 - 1  # of a p-norm
INT16_RANGE: Final = 32760.0
DEFAULT_SIMILARITY: Final[Similarity] = "cosine"
NO_EMBEDDINGS: Final = (
    "this server makes no embeddings; start it with --embeddings (LLM(embeddings=True))"
)


def check_norm(norm: object, name: str) -> None:
    """Raise RequestError, which names the field, where it is no norm of a vector."""
    is_order = isinstance(norm, int) and not isinstance(norm, bool) and 1 <= norm <= MOST_ORDER
    if not is_order and norm != "int16":
        raise RequestError(
            f"{name} is {norm!r}; give 2, for vectors of Euclid's length 1, another whole number "
            f'of at least 1, for the p-norm, or "int16", for numbers up to {int(INT16_RANGE)}',
            name,
        )


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How one prompt is embedded.

    Attributes:
        dimensions: numbers of the vector, which is cut to its first ones; None: all.
        normalize: whether the vector gets length 1; None: as the model says.
        prompt_name: of the model's prompt that goes ahead of a text, "" for none; None: as the
            model says.
        truncate_prompt_tokens: tokens that a prompt is cut to, which leaves the model's prompt
            and special tokens around a text as they are; -1: as many as there is room for. None:
            what is too long is refused.
        truncation_side: the end of a text that is cut away, "left" or "right".
        norm: which length `normalize` makes 1: the p-norm, of which 2 is Euclid's; "int16": the
            largest number becomes 32760, llama.cpp's way to whole numbers of 16 bits.
        per_token: whether each token has a vector, and not the prompt; all are computed then.

    Raises:
        RequestError: a value is out of its range; names it.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Side = CUT_SIDE
    norm: Norm = EUCLIDEAN
    per_token: bool = False

    def __post_init__(self) -> None:
        size, normalize = self.dimensions, self.normalize
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise RequestError(
                f"dimensions is {size!r}; give a whole number of at least 1", "dimensions"
            )
        if not isinstance(normalize, bool | None):
            raise RequestError(f"normalize is {normalize!r}; give true or false", "normalize")
        check_norm(self.norm, "norm")
        if not isinstance(self.prompt_name, str | None):
            raise RequestError(f"prompt_name is {self.prompt_name!r}; give a name", "prompt_name")
        check_truncation(self.truncate_prompt_tokens)
        if self.truncation_side not in SIDES:
            raise RequestError(
                f"truncation_side is {self.truncation_side!r}; give one of {', '.join(SIDES)}",
                "truncation_side",
            )


@dataclass(frozen=True, slots=True)
class Embedder:
    """How a model embeds: what its checkpoint says, and whoever runs it.

    Attributes:
        pooling: "last" takes what the model makes of the last token, "mean" the mean of all.
        normalized: whether vectors of requests that do not say get length 1.
        dimensions: what vectors may be cut to; None: they may not.
        generates: whether the model has a head, so that it can generate as well.
        similarity: how near two vectors are.
        max_tokens: of a text; None: as many as the context has.
        prompts: by name, what goes ahead of a text.
        default_prompt: the name of the one ahead of texts that ask for none; None: nothing is.
    """

    pooling: Pooling = DEFAULT_POOLING
    normalized: bool = DEFAULT_NORMALIZED
    dimensions: Dimensions | None = None
    generates: bool = True
    similarity: Similarity = DEFAULT_SIMILARITY
    max_tokens: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None

    @classmethod
    def of(
        cls,
        spec: EmbeddingSpec | None,
        pooling: Pooling | None = None,
        dimensions: Dimensions | None = None,
    ) -> Embedder:
        """Return how a model embeds.

        Args:
            spec: what its checkpoint says; None: nothing.
            pooling: what is laid over that, as `dimensions`; None: nothing is.
            dimensions: see the attribute.
        """
        spec = spec or EmbeddingSpec()
        if dimensions is None and spec.matryoshka:
            dimensions = spec.dimensions or "any"
        return cls(
            pooling or spec.pooling or DEFAULT_POOLING,
            DEFAULT_NORMALIZED if spec.normalized is None else spec.normalized,
            dimensions,
            generates=not spec.only,
            similarity=spec.similarity or DEFAULT_SIMILARITY,
            max_tokens=spec.max_tokens,
            prompts=spec.prompts,
            default_prompt=spec.default_prompt,
        )

    def prompt(self, name: str | None) -> str:
        """Return what goes ahead of a text.

        Args:
            name: of the prompt, "" for none; None: as the model says.

        Raises:
            RequestError: there is no prompt of this name.
        """
        name = self.default_prompt if name is None else name
        if not name:
            return ""
        if name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise RequestError(
                f"prompt_name is {name[:80]!r}, and this model has {known}; name one of them, or "
                "write it ahead of the text",
                "prompt_name",
            )
        return self.prompts[name]

    def prompt_of(self, *names: str) -> str:
        """Return the first prompt that the model has of some names, or else its default one."""
        found = next((name for name in names if name in self.prompts), None)
        return self.prompt(found)

    def check_tokens(self, num_tokens: int) -> None:
        """Raise CapacityError where a text has more tokens than the model was made for."""
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            raise CapacityError(
                f"the text has {num_tokens} prompt tokens, and this model embeds "
                f"{self.max_tokens} at most (max_seq_length); shorten it, or let it be cut with "
                "truncate_prompt_tokens -1 (onnxport embed and rerank: --truncate)"
            )

    @property
    def reads_all(self) -> bool:
        """Whether the vector depends on what the model makes of every token of the prompt."""
        return self.pooling == "mean"

    def check(self, params: PoolingParams, size: int) -> None:
        """Raise RequestError where a vector of `size` numbers cannot be cut as it is asked for."""
        asked, allowed = params.dimensions, self.dimensions
        if asked is None or asked == size:
            return
        if asked > size:
            raise RequestError(
                f"dimensions is {asked}, and vectors have {size} numbers; ask for fewer",
                "dimensions",
            )
        if allowed is None:
            raise RequestError(
                f"dimensions is {asked}, and the vectors of this model, of {size} numbers, are not "
                "known to mean anything if they are cut (Matryoshka); leave it out, or start the "
                "server with --matryoshka-dimensions if they do",
                "dimensions",
            )
        if allowed != "any" and asked not in allowed:
            listed = ", ".join(map(str, allowed))
            raise RequestError(
                f"dimensions is {asked}; vectors of this model have {size} numbers, or are cut to "
                f"{listed}",
                "dimensions",
            )


class Rows:
    """What is made of each token of a prompt, while these are computed; see `Pooler`.

    It is made step by step, so that no step takes the time of a whole prompt, and what the model
    made of tokens is not kept.
    """

    __slots__ = ("_finish", "_found", "num_read")

    def __init__(self, finish: Callable[[Floats], Floats]) -> None:
        """Begin without any; `finish` makes rows of states, float32 [num_tokens, hidden]."""
        self._finish = finish
        self._found: list[Floats] = []
        self.num_read = 0  # tokens, the first ones

    def read(self, first: int, states: Floats) -> None:
        """Read what the model has made of tokens; see `Pooler.read`."""
        end = first + len(states)
        assert first <= self.num_read, f"tokens {self.num_read} to {first} were not told of"
        if end > self.num_read:
            with np.errstate(all="ignore"):  # of numbers that are not finite
                self._found.append(self._finish(states[self.num_read - first :]))
            self.num_read = end

    def found(self) -> Floats | None:
        """Return a row for each token, in memory of their own; None: one is not finite."""
        rows = np.concatenate(self._found)
        return rows if np.isfinite(rows).all() else None


class Pooler:
    """The vector of one prompt, or of each of its tokens, while these are computed.

    It reads what the model makes of tokens, each once, in their order. A prompt that is computed
    again, since it has yielded, is told of them again, and what was read is not read anew.
    """

    __slots__ = (
        "_dimensions",
        "_norm",
        "_normalizes",
        "_num_tokens",
        "_pooled",
        "_read",
        "_rows",
        "pooling",
    )

    def __init__(self, embedder: Embedder, params: PoolingParams, num_tokens: int) -> None:
        """Begin without any.

        Args:
            embedder: how the model embeds.
            params: of the request.
            num_tokens: of the prompt.
        """
        self.pooling = embedder.pooling
        normalize = params.normalize
        self._normalizes = embedder.normalized if normalize is None else normalize
        self._norm = params.norm
        self._dimensions = params.dimensions
        self._num_tokens = num_tokens
        self._read = 0  # tokens, the first ones
        self._pooled: NDArray[np.float64] | None = None  # their sum, or what is of the last one
        self._rows = Rows(self._finished) if params.per_token else None  # of each token

    def read(self, first: int, states: Floats) -> None:
        """Read what the model has made of tokens.

        Args:
            first: the number of the first of them, from 0.
            states: float32 [num_tokens, hidden], which the next step may overwrite.
        """
        end = first + len(states)
        if self._rows is not None:
            self._rows.read(first, states)
            self._read = self._rows.num_read
            return
        if self.pooling == "last":
            if end == self._num_tokens:
                self._pooled = states[-1].astype(np.float64)
            self._read = end
            return
        assert first <= self._read, f"tokens {self._read} to {first} were not told of"
        if end <= self._read:
            return
        rows = states[self._read - first :].astype(np.float64)
        if self._pooled is not None:
            rows = np.concatenate([self._pooled[None], rows])
        with np.errstate(all="ignore"):
            # Row by row, in their order: the sum does not depend on where chunks begin.
            self._pooled = np.add.reduce(rows, axis=0)
        self._read = end

    def vector(self) -> Floats | None:
        """Return the vector, float32 [dimensions], in memory of its own; None: it is not finite.

        That of each token is a row of [num_tokens, dimensions]. All tokens have been read.
        """
        assert self._read == self._num_tokens, f"{self._read} of {self._num_tokens} tokens read"
        if self._rows is not None:
            return self._rows.found()
        assert self._pooled is not None
        pooled = self._pooled
        with np.errstate(all="ignore"):  # of numbers that are not finite
            is_mean = self.pooling == "mean"
            [vector] = self._finished((pooled / self._num_tokens if is_mean else pooled)[None])
        return vector if np.isfinite(vector).all() else None

    def _finished(self, pooled: NDArray[Any]) -> Floats:
        """Return each row of what was pooled with its dimensions and its length."""
        pooled = pooled[:, : self._dimensions].astype(np.float64)
        if self._normalizes:
            lengths = np.array([_length(row, self._norm) for row in pooled])
            pooled /= np.where(lengths == 0, 1, lengths)[:, None]
        found: Floats = pooled.astype(np.float32)
        return found


def _length(vector: NDArray[np.float64], norm: Norm) -> np.float64:
    """Return what a vector is divided by. Source: llama.cpp's `common_embd_normalize`."""
    length: np.float64
    if norm == EUCLIDEAN:
        length = np.sqrt(np.dot(vector, vector))
        return length
    sizes = np.abs(vector)
    largest: np.float64 = sizes.max()
    if norm == "int16":
        return largest / INT16_RANGE
    if largest == 0:
        return largest
    powers = (sizes / largest) ** norm  # none is so large that the sum is not finite
    length = largest * np.sum(powers) ** (1 / norm)
    return length


def pool(plan: StepPlan, states: Floats) -> list[Request]:
    """Let the prompts of a step that are embedded read what was made of their tokens.

    Args:
        plan: of the step.
        states: float32 [plan.num_tokens, hidden].

    Returns:
        Those that have been read to their end.
    """
    done = []
    start = 0
    for row, request in enumerate(plan.requests):
        past, new = plan.num_past[row], plan.num_new[row]
        if request.pooler is not None:
            request.pooler.read(past, states[start : start + new])
            if past + new == len(request.tokens):
                done.append(request)
        start += new
    return done
