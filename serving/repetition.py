"""When an output is stuck: that ends with one pattern, again and again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from onnxport.errors import RequestError

NAME: Final = "repetition_detection"
STOP_REASON: Final = "repetition_detected"  # vLLM's
MAX_PATTERN: Final = 1024  # tokens; with each token of an output as many are compared
MAX_COUNT: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """When an output is stuck, with vLLM's names and defaults; then it ends.

    Source: vLLM's `RepetitionDetectionParams`.

    Attributes:
        max_pattern_size: most tokens of a pattern; 0: nothing is looked for.
        min_pattern_size: least tokens of one; 0 means 1.
        min_count: how often in a row a pattern stands at the end of an output that is stuck.

    Raises:
        RequestError: a value is out of its range, or they contradict each other.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        self._check("max_pattern_size", MAX_PATTERN)
        self._check("min_pattern_size", MAX_PATTERN)
        self._check("min_count", MAX_COUNT)
        if self.min_pattern_size > self.max_pattern_size:
            raise RequestError(
                f"{NAME} has the min_pattern_size {self.min_pattern_size} and the max_pattern_size "
                f"{self.max_pattern_size}; give a largest size that is no less, or 0 for both to "
                "look for nothing",
                f"{NAME}.min_pattern_size",
            )
        if self.is_on and self.min_count < 2:
            raise RequestError(
                f"{NAME} has the min_count {self.min_count}, and what stands there once does not "
                "repeat itself; give 2 or more, or a max_pattern_size of 0 to look for nothing",
                f"{NAME}.min_count",
            )

    @property
    def is_on(self) -> bool:
        """Whether anything is looked for."""
        return self.max_pattern_size > 0

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> RepetitionDetection:
        """Return what a mapping with the names of the fields says.

        Args:
            given: members that are None count as left out.

        Raises:
            RequestError: a name is not known, or as the constructor.
        """
        known = [each.name for each in fields(cls)]
        told = {name: value for name, value in given.items() if value is not None}
        if unknown := [name for name in told if name not in known]:
            raise RequestError(
                f"{NAME} has {unknown[0][:80]!r}, which is not known; it takes {', '.join(known)}",
                NAME,
            )
        return cls(**told)

    def _check(self, name: str, most: int) -> None:
        """Raise RequestError unless a field is an integer from 0 to `most`."""
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            raise RequestError(
                f"{NAME}.{name} is {repr(value)[:80]}; it must be an integer in [0, {most}]",
                f"{NAME}.{name}",
            )
