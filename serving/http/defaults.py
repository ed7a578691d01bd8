"""How tokens are sampled when a request does not say: as the model's authors chose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from onnxport.errors import ArtifactError, RequestError
from onnxport.serving.params import SamplingParams

GENERATION_CONFIG = "generation_config.json"

# What a model may choose, by the names of `SamplingParams`.
DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

# What transformers would obey and the engine cannot yet, with the values that change nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "penalty_alpha": (0,),
    "num_beams": (1,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "max_new_tokens": (),
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request that leaves a field out gets; by itself OpenAI's defaults.

    Attributes:
        temperature: see `SamplingParams`, as the others.
        left_out: what the model's configuration asks for and is not supported.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    left_out: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read `generation_config.json`; a folder without one gives OpenAI's defaults.

        Raises:
            ArtifactError: the file is not valid, or a value is out of its range.
        """
        path = folder / GENERATION_CONFIG
        if not path.is_file():
            return cls()
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            given = {name: config[name] for name in DEFAULTED if config.get(name) is not None}
            if config.get("do_sample") is False:  # what is left changes the likeliest token too
                kept = {name: given[name] for name in ("repetition_penalty",) if name in given}
                given = {"temperature": 0.0, **kept}
            params = SamplingParams(**given)
        except (ValueError, TypeError, AttributeError, RequestError) as error:
            raise ArtifactError(
                f"{GENERATION_CONFIG} in {folder} cannot be used: {error}. Correct it, or serve "
                "with --generation-config none."
            ) from error
        left_out = {
            name: config[name]
            for name, neutral in UNSUPPORTED.items()
            if config.get(name) is not None and config[name] not in neutral
        }
        return cls(**{name: getattr(params, name) for name in DEFAULTED}, left_out=left_out)

    def __str__(self) -> str:
        """Return what a log should say."""
        text = ", ".join(f"{name} {getattr(self, name)}" for name in DEFAULTED)
        if self.left_out:
            listed = ", ".join(f"{name} {value}" for name, value in self.left_out.items())
            text += f"; not supported yet and left out: {listed}"
        return text
