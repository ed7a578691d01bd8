"""How tokens are sampled when a request does not say: as the model's authors chose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from onnxport.errors import ArtifactError, RequestError
from onnxport.serving.params import SamplingParams
from onnxport.serving.repetition import RepetitionDetection

GENERATION_CONFIG = "generation_config.json"
GenerationConfig = Literal["auto", "none"]  # the model's own, or OpenAI's defaults

# What a model may choose, by the names of `SamplingParams`.
DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "typical_p")

# What transformers would obey and the engine cannot yet, with the values that change nothing. Beams
# it can, but as in vLLM a request has to ask for them.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (0,),
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
        repetition_detection: see `SamplingParams`; no model chooses it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    typical_p: float = 1.0
    left_out: Mapping[str, Any] = field(default_factory=dict)
    repetition_detection: RepetitionDetection | None = None

    @classmethod
    def of(
        cls,
        folder: Path,
        source: GenerationConfig = "auto",
        override: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return the defaults of whoever runs a model.

        Args:
            folder: of the model.
            source: "auto" takes the model's own, "none" OpenAI's.
            override: laid over them, see `overridden`.

        Raises:
            RequestError: there is no such source, or as `overridden`.
            ArtifactError: as `read`.
        """
        if source not in get_args(GenerationConfig):
            raise RequestError(
                f"generation_config is {source!r}; give 'auto' for the model's own, or 'none'",
                "generation_config",
            )
        cls().overridden(override or {})  # told first, for it is known without the folder
        return (cls.read(folder) if source == "auto" else cls()).overridden(override or {})

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
                f"{GENERATION_CONFIG} in {folder} cannot be used: {error}. Correct it, or do "
                'without it: --generation-config none (in Python generation_config="none").'
            ) from error
        left_out = {
            name: config[name]
            for name, neutral in UNSUPPORTED.items()
            if config.get(name) is not None and config[name] not in neutral
        }
        return cls(**{name: getattr(params, name) for name in DEFAULTED}, left_out=left_out)

    def overridden(self, given: Mapping[str, Any]) -> Self:
        """Return these with other values.

        Args:
            given: by name; no others than those of this class are known.

        Raises:
            RequestError: a name is not known, or a value is out of its range.
        """
        if unknown := [name for name in given if name not in DEFAULTED]:
            raise RequestError(
                f"the generation config is overridden by {', '.join(map(repr, unknown))}, which "
                f"is not known; allowed are {', '.join(DEFAULTED)}",
                "override_generation_config",
            )
        params = SamplingParams(**given)
        return replace(self, **{name: getattr(params, name) for name in given})

    def for_beams(self) -> SamplingDefaults:
        """Return what a beam search gets: of the model's only what changes the likeliest, too.

        It draws nothing, and what it compares texts by is the model's own unless it says otherwise.
        """
        return SamplingDefaults(temperature=0.0, repetition_penalty=self.repetition_penalty)

    def filled(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return all of them by name: as given, and these where that is None or not there."""
        return {
            name: getattr(self, name) if given.get(name) is None else given[name]
            for name in DEFAULTED
        }

    def __str__(self) -> str:
        """Return what a log should say."""
        text = ", ".join(f"{name} {getattr(self, name)}" for name in DEFAULTED)
        if self.left_out:
            listed = ", ".join(f"{name} {value}" for name, value in self.left_out.items())
            text += f"; not supported yet and left out: {listed}"
        if self.repetition_detection is not None:
            text += f"; {self.repetition_detection}"
        return text
