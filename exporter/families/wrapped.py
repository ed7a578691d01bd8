"""Models that read images around a text model, which is the part of them that is exported.

Their `config.json` holds that of the text model in `text_config`. Its tensors have one of two
layouts: transformers writes `language_model.model.…` and `language_model.lm_head.weight`, and its
own modules, in which some checkpoints were saved, have `model.language_model.…` and
`lm_head.weight`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from onnxport.errors import UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.graphs.spec import ArchSpec

TEXT_CONFIG: Final = "text_config"
_OF_IMAGES: Final = ("vision_tower.", "multi_modal_projector.")


def wrapped(
    *texts: Family,
    name: str,
    architecture: str,
    image_keys: Collection[str],
    defaults: Mapping[str, Any] | None = None,
    layouts: Sequence[TensorNames] | None = None,
) -> Family:
    """The family of a model around one of some other families.

    Args:
        texts: The text model's: what it may be, first where it does not say.
        name: transformers' model_type.
        architecture: transformers' class.
        image_keys: Keys of its configuration that are about images alone.
        defaults: Keys of `text_config` that checkpoints leave out, with what they then are.
        layouts: How its checkpoints may name tensors; None: in either way, see above.
    """

    def read_spec(config: Config, context_length: int | None) -> ArchSpec:
        for key in image_keys:
            config.get(key, object, None)
        inner = Config(
            {
                **(defaults or {}),
                **config.require(TEXT_CONFIG, dict),
                # transformers reads that of the whole model; where it is absent the head tells
                "tie_word_embeddings": config.get("tie_word_embeddings", bool, True),
            },
            config.path / TEXT_CONFIG,
        )
        model_type = inner.get("model_type", str, texts[0].name)
        text = next((one for one in texts if one.name == model_type), None)
        if text is None:
            raise UnsupportedModelError(
                f"{inner.path} is of the model_type {model_type!r}; supported in a {architecture} "
                f"is {' or '.join(repr(one.name) for one in texts)}."
            )
        spec = text.spec(inner, context_length)
        inner.check_all_used(text.name)
        return spec

    names = dict.fromkeys(text.tensors for text in texts)
    first, *others = layouts or [
        layout
        for one in names
        for layout in (older_names(one, _OF_IMAGES), newer_names(one, _OF_IMAGES))
    ]
    return Family(
        name=name,
        architecture=architecture,
        spec=read_spec,
        tensors=first,
        other_layouts=tuple(others),
        head_tells=True,
        mtp=texts[0].mtp,
    )


def older_names(names: TensorNames, images: tuple[str, ...]) -> TensorNames:
    """The names of a text model's tensors that lies beside what reads images as a whole.

    Args:
        names: Of the text model alone.
        images: Prefixes of the part that reads images.
    """
    prefix = "language_model."
    moved = names.moved(lambda name: prefix + name)
    return replace(moved, head=prefix + names.head, images=images)


def newer_names(names: TensorNames, images: Sequence[str]) -> TensorNames:
    """The names of a text model's tensors in transformers' own modules.

    Args:
        names: Of the text model alone.
        images: Prefixes of the part that reads images, behind "model.".
    """

    def moved(name: str) -> str:
        return f"model.language_model.{name.removeprefix('model.')}"

    return replace(names.moved(moved), images=tuple(f"model.{prefix}" for prefix in images))
