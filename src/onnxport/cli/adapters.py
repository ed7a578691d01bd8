"""LoRA adapters on the command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from onnxport.cli.values import positive
from onnxport.errors import AdapterError, CapacityError, RequestError

if TYPE_CHECKING:
    from onnxport.graphs.lora import LoraAdapter
    from onnxport.providers.base import LoadOptions
    from onnxport.serving.adapters.peft import AdapterContent
    from onnxport.serving.params import RequestOptions

DEFAULT_LORAS = 8
DEFAULT_LORA_RANK = 16
LORA = "lora"  # what the only adapter of a command is called
LATER = ("enable_lora", "allow_runtime_lora", "lora_folder")  # with which others may come
DTYPES = ("auto", "fp32", "fp16", "bf16", "int8", "int4")


def lora_module(text: str) -> tuple[str, Path]:
    """Parse the name and the path of an adapter: NAME=PATH, or an object as vLLM takes it."""
    if text.lstrip().startswith("{"):
        return _module_object(text)
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH, as in sql=adapters/sql")
    return name, Path(path)


def _module_object(text: str) -> tuple[str, Path]:
    """Parse vLLM's form; what `base_model_name` says is only reported there, too."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if unknown := sorted(found.keys() - {"name", "path", "base_model_name"}):
        raise argparse.ArgumentTypeError(
            f"{text!r} has the unknown field {unknown[0]!r}; allowed are name, path and "
            "base_model_name"
        )
    name, path = found.get("name"), found.get("path")
    base = found.get("base_model_name")
    if not (isinstance(name, str) and name and isinstance(path, str) and path):
        raise argparse.ArgumentTypeError(
            f'{text!r} needs a name and a path, as in {{"name": "sql", "path": "adapters/sql"}}'
        )
    if not isinstance(base, str | None):
        raise argparse.ArgumentTypeError(f"{text!r} has a base_model_name that is not a text")
    return name, Path(path)


def scaled_adapters(text: str) -> list[tuple[str, Path, float]]:
    """Parse llama.cpp's FNAME:SCALE, or several with commas between; each is called as its file."""
    from onnxport.serving.param_ranges import MAX_SCALE

    found = []
    for part in text.split(","):
        path, colon, number = part.rpartition(":")
        try:
            scale = float(number)
        except ValueError:
            colon = ""
        if not (colon and path and abs(scale) <= MAX_SCALE):
            raise argparse.ArgumentTypeError(
                f"{part!r} is not FNAME:SCALE, as in adapters/sql.gguf:0.5, with a scale of "
                f"-{MAX_SCALE:g} to {MAX_SCALE:g}"
            )
        file = Path(path)
        name = file.stem if file.suffix.lower() == ".gguf" else file.resolve().name
        found.append((name, file, scale))
    return found


def add_adapter_options(parser: argparse.ArgumentParser) -> None:
    """Add which LoRA adapters a server has."""
    group = parser.add_argument_group("LoRA adapters")
    group.add_argument(
        "--lora-modules",
        type=lora_module,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=PATH",
        help="adapters to load, folders as PEFT writes them or .gguf files of llama.cpp; requests "
        'pick one as their model; also as {"name": NAME, "path": PATH}',
    )
    _add_scaled(group, "requests that pick none are answered with")
    group.add_argument(
        "--enable-lora", action="store_true", help=f"room for {DEFAULT_LORAS} adapters"
    )
    group.add_argument(
        "--max-loras",
        type=positive,
        metavar="N",
        help="most adapters in one batch (as many as --lora-modules names, at least 8 where others "
        "may come)",
    )
    group.add_argument(
        "--max-cpu-loras",
        dest="max_host_adapters",
        type=positive,
        metavar="N",
        help="most adapters that are loaded, those without room in a batch in host memory (as many "
        "as --max-loras)",
    )
    group.add_argument(
        "--max-lora-rank",
        type=positive,
        metavar="R",
        help=f"largest rank of an adapter ({DEFAULT_LORA_RANK}, or that of --lora-modules)",
    )
    _add_dtype(group)
    group.add_argument(
        "--allow-runtime-lora",
        action="store_true",
        help="let requests load adapters from paths of this machine (/v1/load_lora_adapter); "
        "for clients that are trusted",
    )
    group.add_argument(
        "--lora-folder",
        type=Path,
        metavar="DIR",
        help="adapters that requests name and that are not loaded are read from DIR/NAME, or from "
        "DIR/NAME.gguf; those that nobody uses make room for them",
    )


def add_adapter_option(parser: argparse.ArgumentParser) -> None:
    """Add the one LoRA adapter of a command that answers by itself."""
    parser.add_argument(
        "--lora",
        type=Path,
        metavar="PATH",
        help="answer with this LoRA adapter, a folder of PEFT or a .gguf file of llama.cpp",
    )
    _add_scaled(parser, "answer with")
    _add_dtype(parser)


def _add_scaled(parser: argparse._ActionsContainer, what: str) -> None:
    parser.add_argument(
        "--lora-scaled",
        type=scaled_adapters,
        action="extend",
        default=[],
        metavar="PATH:SCALE",
        help=f"{what} the sum of these LoRA adapters, each times its scale; several with commas "
        "between",
    )


def _add_dtype(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--lora-dtype",
        choices=DTYPES,
        metavar="TYPE",
        help="what adapters are kept in, where the provider can: fp32, fp16, bf16, int8, or int4, "
        "which is least to read and least exact (auto)",
    )


def request_options(options: argparse.Namespace) -> RequestOptions:
    """Return how the requests of a command that answers by itself are treated."""
    from onnxport.serving.params import RequestOptions

    if options.lora is not None and options.lora_scaled:
        raise RequestError(
            f"--lora {options.lora} and --lora-scaled were given; give the first as --lora-scaled "
            f"{options.lora}:1, and both are added up"
        )
    return RequestOptions(adapter=None if options.lora is None else LORA)


def named_adapters(options: argparse.Namespace) -> list[tuple[str, Path]]:
    """Return the adapters that were asked for, by name, in the order in which they are loaded."""
    named: list[tuple[str, Path]] = list(getattr(options, "lora_modules", ()))
    if getattr(options, "lora", None) is not None:
        named.append((LORA, options.lora))
    named += [(name, path) for name, path, _ in getattr(options, "lora_scaled", ())]
    return named


def adapter_scales(options: argparse.Namespace) -> dict[str, float]:
    """Return what adapters are times in requests that pick none, by name."""
    return {name: scale for name, _, scale in getattr(options, "lora_scaled", ())}


def read_adapters(artifact: Path, options: argparse.Namespace) -> list[tuple[str, AdapterContent]]:
    """Return the adapters that were asked for, by name.

    Raises:
        AdapterError: one cannot be read, does not fit the model, or two have one name.
    """
    if not (named := named_adapters(options)):
        return []
    names = [name for name, _ in named]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise AdapterError(
            f"{_giving(options)} names {', '.join(twice)} twice; choose another name"
            + (", of the file or the folder" if options.lora_scaled else "")
        )
    from onnxport.cli.adapter_files import read_adapter
    from onnxport.graphs.artifact import Artifact

    base = Artifact.read(artifact).manifest.model
    return [(name, read_adapter(path, base)) for name, path in named]


def with_slots(
    load: LoadOptions, options: argparse.Namespace, adapters: Sequence[tuple[str, AdapterContent]]
) -> LoadOptions:
    """Return the provider's options with slots for adapters: how many, and of what rank.

    Raises:
        CapacityError: two options contradict each other.
    """
    most, rank = getattr(options, "max_loras", None), getattr(options, "max_lora_rank", None)
    later = any(getattr(options, name, False) for name in LATER)
    dtype = getattr(options, "lora_dtype", None)
    host: int | None = getattr(options, "max_host_adapters", None)
    if not (adapters or later or most):
        for name, value in (
            ("--max-lora-rank", rank),
            ("--lora-dtype", dtype),
            ("--max-cpu-loras", host),
        ):
            if value is not None:
                raise CapacityError(
                    f"{name} {value} was given without adapters; add {_giving_adapters(options)}, "
                    "or leave it out"
                )
        return load
    if host is not None and most is not None and host < most:
        raise CapacityError(
            f"--max-cpu-loras is {host}, and --max-loras is {most}; raise the first, or leave it "
            "out"
        )
    if host is not None and host < len(adapters):
        raise CapacityError(
            f"--max-cpu-loras is {host}, and {_giving(options)} names {len(adapters)} adapters; "
            "raise it, or leave it out"
        )
    if host is None and most is not None and most < len(adapters):
        raise CapacityError(
            f"--max-loras is {most}, and {_giving(options)} names {len(adapters)} adapters; raise "
            f"it, leave it out, or give --max-cpu-loras {len(adapters)}"
        )
    for name, content in adapters:
        if rank is not None and content.adapter.rank > rank:
            raise CapacityError(
                f"--max-lora-rank is {rank}, and the adapter {name} has rank "
                f"{content.adapter.rank}; raise it, or leave it out"
            )
    ranks = [content.adapter.rank for _, content in adapters]
    scales = adapter_scales(options)
    summed = [content.adapter for name, content in adapters if scales.get(name)]
    ranks.append(_joint_rank(summed))
    if later or most:  # others may come
        ranks.append(DEFAULT_LORA_RANK)
    is_mix = any(scale not in (0.0, 1.0) for scale in scales.values()) or len(summed) > 1
    slots = max(DEFAULT_LORAS if later else 1, len(adapters) + is_mix)
    if host is not None:
        slots = min(host, slots)
    return replace(
        load,
        max_adapters=most or slots,
        max_adapter_rank=rank or max(ranks),
        adapter_dtype=dtype or "auto",
    )


def _joint_rank(adapters: Sequence[LoraAdapter]) -> int:
    """Return the rank of a sum of adapters."""
    from onnxport.serving.adapters.mixes import joint_ranks

    return max(joint_ranks(one.ranks for one in adapters).values(), default=0)


def _giving(options: argparse.Namespace) -> str:
    """The options that named adapters."""
    names = {"lora_modules": "--lora-modules", "lora": "--lora", "lora_scaled": "--lora-scaled"}
    return " and ".join(text for name, text in names.items() if getattr(options, name, None))


def _giving_adapters(options: argparse.Namespace) -> str:
    """The options of a command that give it adapters."""
    return "--enable-lora or --lora-modules" if hasattr(options, "lora_modules") else "--lora"
