"""What an exporter reads of a `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from onnxport.exporter.config import Config
from onnxport.exporter.families import find_family
from onnxport.graphs.spec import ArchSpec


def read(values: Mapping[str, Any], context_length: int | None = None) -> ArchSpec:
    """Return the architecture; every key has to be known."""
    return spec_of(Config(values, Path("config.json")), context_length)


def spec_of(config: Config, context_length: int | None = None) -> ArchSpec:
    """Likewise of a configuration that was read."""
    family = find_family(config)
    spec = family.spec(config, context_length)
    config.check_all_used(family.name)
    return spec


def respelled(values: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` as transformers 5 writes it again."""
    told = {key: one for key, one in values.items() if key not in ("architectures", "model_type")}
    config = AutoConfig.for_model(values["model_type"], **deepcopy(told))
    config.architectures = values["architectures"]
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    assert "rope_theta" not in written
    return written
