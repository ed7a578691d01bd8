"""Greedy decoding through the engine, on a model that stays open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import ProviderError
from onnxport.graphs.lora import LoraAdapter
from onnxport.kv.groups import CacheGroups
from onnxport.providers.base import Capabilities, Model, StepInputs
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.outputs import Failure
from onnxport.serving.params import SamplingParams
from onnxport.serving.stats import EngineStats
from onnxport.serving.verify.prompts import NEW_TOKENS, Prompt

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decoded:
    """What an engine generated."""

    tokens: tuple[Tokens, ...]  # one a prompt, without the prompt
    stats: EngineStats
    failure: str  # of steps that failed and were tried again, see `failed_steps`; "" of none


class LentModel:
    """A model that an engine may use and not close, or a part of its KV cache.

    Attributes:
        failure: the first error that it raised, which the engine may have got over; "" if none.
    """

    def __init__(self, model: Model, num_blocks: int | None = None) -> None:
        """Lend `model`.

        Args:
            model: stays open.
            num_blocks: of its pool that may be used; None: all.
        """
        self.failure = ""
        self._model = model
        self._capabilities = model.capabilities
        if num_blocks is not None:
            limits = self._capabilities
            assert 1 <= num_blocks <= limits.num_blocks
            groups = CacheGroups(limits.windows, limits.block_size)
            longest = min(limits.max_model_len, groups.longest(num_blocks) * limits.block_size)
            self._capabilities = replace(limits, num_blocks=num_blocks, max_model_len=longest)

    @property
    def capabilities(self) -> Capabilities:
        """Those of the model, or of the part of its cache."""
        return self._capabilities

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        """See `providers.base.Model.run`."""
        with self._noting():
            return self._model.run(inputs)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `providers.base.Model.copy_blocks`."""
        with self._noting():
            self._model.copy_blocks(sources, targets)

    def read_blocks(self, blocks: Sequence[int]) -> NDArray[np.generic]:
        """See `providers.base.Model.read_blocks`."""
        with self._noting():
            return self._model.read_blocks(blocks)

    def write_blocks(self, blocks: Sequence[int], content: NDArray[np.generic]) -> None:
        """See `providers.base.Model.write_blocks`."""
        with self._noting():
            self._model.write_blocks(blocks, content)

    def set_adapter(self, slot: int, adapter: LoraAdapter | None) -> None:
        """See `providers.base.Model.set_adapter`."""
        self._model.set_adapter(slot, adapter)

    def close(self) -> None:
        """Do nothing: the model is only lent."""

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Keep the first error."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or Failure.of(error).message
            raise


def failed_steps(engine: Engine, model: LentModel) -> str:
    """What to tell of steps that failed, though the engine got over it; "" where none did.

    An engine tries the requests of such a step in halves, down to one alone, so that all of them
    may end well on a model that runs no batch.
    """
    count = engine.stats().num_failed_steps
    if not count:
        return ""
    steps = "a step" if count == 1 else f"{count} steps"
    return f"{steps} failed and were tried again: {model.failure or 'see the log'}"


def decode(
    model: Model,
    prompts: Sequence[Prompt],
    config: EngineConfig,
    *,
    one_by_one: bool = False,
    num_blocks: int | None = None,
) -> Decoded:
    """Continue every prompt by NEW_TOKENS of the likeliest tokens.

    Args:
        model: stays open.
        prompts: may hold one more than once.
        config: of the engine.
        one_by_one: begin a prompt when the one before it has ended.
        num_blocks: of the KV cache that may be used; None: all.

    Raises:
        ProviderError: a request failed.
    """
    lent = LentModel(model, num_blocks)
    engine = Engine(lent, config=config)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    found: list[list[int]] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        engine.submit(engine.prepare(str(number), prompt, params))
        if one_by_one:
            _finish(engine, found)
    _finish(engine, found)
    tokens = tuple(tuple(one) for one in found)
    return Decoded(tokens, engine.stats(), failed_steps(engine, lent))


def _finish(engine: Engine, found: list[list[int]]) -> None:
    """Step until nothing is left to do."""
    while engine.has_work:
        for delta in engine.step():
            if delta.finish_reason == "error":
                raise ProviderError(f"a request failed while decoding: {delta.error}")
            found[int(delta.request_id)] += delta.token_ids
