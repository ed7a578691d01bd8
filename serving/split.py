"""What a piece of generated text was split into."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """What one piece of text gave. Reasoning comes before content."""

    reasoning: str = ""
    content: str = ""
