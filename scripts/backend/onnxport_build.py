"""The build backend: scikit-build-core, and OpenVINO's package where there is a wheel of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openvino_wheels import requirement
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from scikit_build_core.build import get_requires_for_build_editable as _for_editable
from scikit_build_core.build import get_requires_for_build_wheel as _for_wheel

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = Mapping[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """What a wheel is built with."""
    return [*_for_wheel(config_settings), *requirement()]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """What an editable installation is built with."""
    return [*_for_editable(config_settings), *requirement()]
