"""What does not go with models whose layers have K/V of several shapes."""

from __future__ import annotations

from onnxport.errors import OptionError
from onnxport.serving.config import EngineConfig


def refuse_tiers(config: EngineConfig) -> None:
    """Raise OptionError where blocks are to be kept outside of the pool."""
    tiers = [name for name in ("kv_host_memory", "kv_disk") if getattr(config, name)]
    if tiers:
        raise OptionError(
            f"the heads of this model's layers differ, and blocks of their K/V have no form in which "
            f"they could be kept elsewhere: {' and '.join(tiers)} must be left out"
        )
