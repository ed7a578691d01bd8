"""Models whose layers keep states of sequences: what goes with them, and what not.

A state stands for all tokens of a sequence so far. It cannot go back behind some of them, so where
guesses proved wrong a request goes on from the state before that step (`Request.num_owed_tokens`).
And K/V of a prefix are of no use without the state at its end.
"""

from __future__ import annotations

import logging
from typing import Final

from onnxport.errors import OptionError
from onnxport.kv.states import SLOTS_PER_SEQUENCE, StatePool
from onnxport.providers.base import Capabilities
from onnxport.serving.config import EngineConfig

logger = logging.getLogger(__name__)

# States that are kept for requests that will begin alike, while as many sequences run as may.
KEPT_STATES: Final = 8

# Likewise of those in host memory, however little the KV cache has.
LEAST_KEPT: Final = 2


def most_kept(limits: Capabilities) -> int | None:
    """Return how many states are kept at most that nobody holds; None: as many as fit.

    In host memory, which a slot takes when it is first used, they get as much as K/V: a prefix is
    of no use without either.
    """
    if not limits.host_states:
        return None
    cache_bytes = limits.num_blocks * limits.kv_block_bytes
    return max(LEAST_KEPT, cache_bytes // limits.state_bytes)


def slots_wanted(config: EngineConfig) -> int:
    """Return for how many states a model should have room: `LoadOptions.state_slots`."""
    kept = KEPT_STATES if config.enable_prefix_caching else 0
    return SLOTS_PER_SEQUENCE * config.max_num_seqs + kept


def check_options(config: EngineConfig) -> None:
    """Refuse what a model with linear attention cannot do.

    Raises:
        OptionError: names the options.
    """
    tiers = [name for name in ("kv_host_memory", "kv_disk") if getattr(config, name)]
    if tiers:
        raise OptionError(
            "this model has layers that keep a state of each sequence, and these options do not go "
            f"with it: {' and '.join(tiers)} (K/V are of no use without the state behind them). "
            "Leave them out"
        )


def rows_for(states: StatePool | None, rows: int, *, keeps: bool) -> int:
    """Return how many of `rows` sequences have a state to hold and one to write in each step.

    Args:
        states: the slots; None: the model has no states, and all run.
        rows: that would run otherwise.
        keeps: whether states are kept for requests that will begin alike. These get slots of their
            own, up to a quarter of all; where rows leave none, the next step overwrites them.
    """
    if states is None:
        return rows
    kept = min(KEPT_STATES, states.num_slots // 4) if keeps else 0
    fits = max(1, (states.num_slots - kept) // SLOTS_PER_SEQUENCE)
    if fits >= rows:
        return rows
    logger.warning(
        "there is room for %d states, so %d sequences run at once, not %d: each needs %d, and %d "
        "are for those that will begin alike",
        states.num_slots,
        fits,
        rows,
        SLOTS_PER_SEQUENCE,
        states.num_slots - SLOTS_PER_SEQUENCE * fits if keeps else 0,
    )
    return fits
