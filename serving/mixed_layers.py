"""What does not go with models whose layers have K/V of several shapes."""

from __future__ import annotations

from onnxport.errors import OptionError
from onnxport.serving.config import EngineConfig


def refuse_tiers(config: EngineConfig) -> None:
    """Raise OptionError where blocks are to be kept outside of the pool."""
    tiers = [name for name in ("kv_host_memory", "kv_disk") if getattr(config, name)]
    if tiers:
        raise OptionError(
            "the heads of this model's layers differ, and blocks of their K/V have no form in "
            f"which they could be kept elsewhere: leave out {' and '.join(tiers)}"
        )
