"""A loaded model with all that is sized by it, and how another one takes its place."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import DeviceLostError
from onnxport.graphs.contract import mask_words, summary_floats
from onnxport.graphs.spec import ArchSpec
from onnxport.kv.pool import BlockPool
from onnxport.kv.states import StatePool
from onnxport.kv.table import Reservation
from onnxport.providers.base import Capabilities, Model, StepInputs
from onnxport.serving.adapters.registry import AdapterRegistry
from onnxport.serving.adapters.slots import Failed, SlotTurns
from onnxport.serving.batch import BatchPacker
from onnxport.serving.config import EngineConfig
from onnxport.serving.fallback import Loss, Standby, describe
from onnxport.serving.linear_attention import most_kept, rows_for
from onnxport.serving.offload import Offloader
from onnxport.serving.request import Request
from onnxport.serving.sampler import native_sampler
from onnxport.serving.scheduler import Scheduler
from onnxport.serving.step_plan import StepPlan
from onnxport.serving.waiting import NO_BARS

logger = logging.getLogger(__name__)


class Runtime:
    """The model, its pool of blocks, its buffers and tiers, and who owns the blocks.

    Attributes:
        limits: what the model can do.
        rows: most sequences of a step.
        tokens: most tokens of a step.
        pool: the blocks of its cache.
        states: the slots for its states; None: it has none.
        packer: makes its inputs.
        summaries: what the model told of the last step's logits beside them; None: nothing.
        hidden_states: what it made of the last step's tokens, `StepInputs.hidden_states`; None:
            nobody reads it, or it tells nothing.
        adapters: the adapters that are loaded, and what is in its slots for them.
        turns: who waits for such a slot.
        offloader: moves blocks to the tiers; None without any.
        scheduler: the same for every model, as are the requests in it.
        losses: the providers that were lost, the latest last.
        failure: why there is no model any more; None while there is one.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        clock: Callable[[], float],
        standby: Standby,
        base: ArchSpec | None = None,
    ) -> None:
        """Take over `model`; adapters have to fit `base`.

        Raises:
            OnnxportError: the folder for K/V blocks cannot be used, or there is no room for the
                states of a sequence.
            DeviceLostError: the device is gone already.
        """
        self._config = config
        self._fallbacks = deque(standby.fallbacks)
        self.losses = standby.losses
        self.failure: str | None = None
        self.summaries: NDArray[np.float32] | None = None
        self.hidden_states: NDArray[np.float32] | None = None
        self._take(model, *new_pools(model))
        self.adapters = AdapterRegistry(model, base, config.max_host_adapters)
        self.turns = SlotTurns(self.adapters)
        self.offloader = Offloader(model, self.pool, config, clock) if config.host_memory else None
        policy = config.scheduling_policy
        self.scheduler = Scheduler(self.pool, self.rows, self.tokens, policy, self.states)
        logger.info("loaded %s", describe(self.limits))

    def prepare(
        self, plan: StepPlan, reservation: Reservation, *, reads_states: bool
    ) -> StepInputs:
        """Save what the step overwrites, copy what it shares, and return its inputs.

        The next call may overwrite them.

        Args:
            plan: of the step.
            reservation: of its blocks.
            reads_states: whether somebody reads `hidden_states` after it.

        Raises:
            DeviceLostError, ProviderError: as `run`.
        """
        if self.offloader and reservation.evictions:
            self.offloader.save(reservation.evictions, self.scheduler)
        if reservation.copies:
            sources, targets = zip(*reservation.copies, strict=True)
            self.model.copy_blocks(sources, targets)
        return self.packer.pack(
            plan,
            reads_states=reads_states,
            slot_of=self.adapters.slot_of,
            states=reservation.states,
        )

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        """Run a step that is prepared.

        Returns:
            Logits, float32 [num_sampled or 1, vocab], host; the next call may overwrite them, and
            what is in `summaries` about them.

        Raises:
            DeviceLostError: the device is gone: `fall_back` is what is left to do.
            ProviderError: the step failed, and may be tried again.
        """
        logits = self.model.run(inputs)
        self.summaries, self.hidden_states = inputs.summaries, inputs.hidden_states
        return logits

    def split_states(self) -> tuple[NDArray[np.float32] | None, NDArray[np.float32] | None]:
        """Return what layers read of the last step's tokens, and what the final norm made of them.

        Each is float32 [num_tokens, numbers], a part of `hidden_states`; None: nothing is told.
        """
        states = self.hidden_states
        if states is None:
            return None, None
        first = self.limits.features - self.limits.final_features
        return (
            states[:, :first] if first else None,
            states[:, first:] if self.limits.final_features else None,
        )

    def load(self) -> set[Request]:
        """Load what waiting requests need from the tiers; see `Offloader.load`.

        Returns:
            Those that keep their place and do not start yet: K/V are on their way to them, or a
            slot for their adapter is drained.
        """
        loading = self.offloader.load(self.scheduler) if self.offloader else set()
        return loading if self.turns.first is None else loading | {self.turns.first}

    def take_slots(self) -> list[Failed]:
        """Give slots to the adapters of requests that are about to start; see `SlotTurns.take`."""
        scheduler, turns, failed = self.scheduler, self.turns, []
        if self.adapters.wants_slots:
            failed = turns.take(scheduler.running, scheduler.waiting)
        elif turns.first is None and turns.bars is NO_BARS:
            return failed
        else:
            turns.clear()
        scheduler.bar(turns.bars)
        return failed

    def fall_back(self, error: DeviceLostError) -> list[Request]:
        """Put the next provider that can be loaded in the place of the one that was lost.

        Requests stay where they are in the queue. If nothing can take over, they have to end, and
        `failure` says why.

        Returns:
            The requests that ran and wait now to be computed again.
        """
        lost = self.limits
        logger.error("the device %s of provider %s was lost: %s", lost.device, lost.provider, error)
        self._close_lost(self.model)
        reasons = []
        while self._fallbacks:
            fallback = self._fallbacks.popleft()
            try:
                yielded = self._move_to(fallback.load())
            except Exception as reason:  # whatever it is, the next one may work
                logger.error("%s cannot take over", fallback.provider, exc_info=reason)
                reasons.append(f"{fallback.provider} could not take over: {reason}")
            else:
                self._note_loss(lost, str(error), self.limits.provider)
                logger.warning(
                    "%s takes over, and computes %d running requests again. %s",
                    fallback.provider,
                    len(yielded),
                    describe(self.limits),
                )
                return yielded
        advice = "start it again, or allow another provider to take over with --fallback"
        parts = [f"the device {lost.device} ({lost.provider}) was lost: {error}", *reasons, advice]
        self.failure = "; ".join(parts)
        self._note_loss(lost, "; ".join(parts[:-1]), None)
        logger.critical("the engine has failed: %s", self.failure)
        return []

    def close(self) -> None:
        """Save what is cached and free the model; no request may own blocks any more."""
        try:
            if self.offloader:
                self.offloader.close(lost=self.failure is not None)
        finally:
            if self.failure is None:
                self.model.close()

    def _take(self, model: Model, pool: BlockPool, states: StatePool | None) -> None:
        """Size everything by `model`."""
        limits = model.capabilities
        most, tokens = self._config.max_num_seqs, self._config.max_num_batched_tokens
        self.model = model
        self.limits: Capabilities = limits
        self.tokens = min(tokens, limits.max_batch_tokens or tokens)
        most = min(most, limits.max_batch_rows or most, self.tokens)
        self.rows = rows_for(states, most, keeps=self._config.enable_prefix_caching)
        self.pool, self.states = pool, states
        is_native = native_sampler() is not None
        self.packer = BatchPacker(
            self.rows,
            self.tokens,
            num_groups=len(limits.windows),
            takes_exact_logits=limits.takes_exact_logits,
            mask_words=mask_words(limits.vocab_size) if is_native else 0,
            summary_floats=(
                summary_floats(limits.vocab_size) if is_native and limits.summarizes_logits else 0
            ),
            features=limits.features,
        )
        self.summaries = self.hidden_states = None

    def _move_to(self, model: Model) -> list[Request]:
        """Go on with `model`, which is closed if that is not possible."""
        try:
            pool, states = new_pools(model)
            self.adapters.move_to(model)
            if self.offloader:
                self.offloader.move_to(model, pool)
        except BaseException:
            self._close_lost(model)
            raise
        self._take(model, pool, states)
        return self.scheduler.move_to(self.pool, self.rows, self.tokens, self.states)

    def _note_loss(self, lost: Capabilities, reason: str, replaced_by: str | None) -> None:
        self.losses = (*self.losses, Loss(lost.provider, lost.device, reason, replaced_by))

    def _close_lost(self, model: Model) -> None:
        try:
            model.close()
        except Exception as error:
            logger.warning("closing what was lost failed too, and may leak memory: %s", error)


def new_pools(model: Model) -> tuple[BlockPool, StatePool | None]:
    """Return the pools of a model's blocks and of its states, if it has any; all are free.

    Raises:
        CapacityError: they hold nothing, or there is no room for the states of a sequence.
    """
    limits = model.capabilities
    blocks = BlockPool(limits.num_blocks, limits.block_size, limits.windows)
    if not limits.state_slots:
        return blocks, None
    kept = most_kept(limits)
    return blocks, StatePool(limits.state_slots, in_place=limits.host_states, max_kept=kept)
