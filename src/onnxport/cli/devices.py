"""`onnxport devices`: what this machine can use, why not the rest, and what runs where."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxport.cli.arguments import Commands, command
from onnxport.errors import CapacityError, ProviderError

if TYPE_CHECKING:
    from onnxport.providers.base import Capabilities, Probe
    from onnxport.providers.ort_devices import OnnxRuntime

FORMAT = 1  # of the JSON; a field that changes its meaning raises it, a new one does not
GIB = 1024**3
CACHE_TOKENS = 1024  # of the KV cache, which is not used
NOTHING_LOADED = 1


@dataclass(frozen=True, slots=True)
class Loaded:
    """What became of an artifact on one provider."""

    provider: str
    reason: str  # why it could not be loaded; "" where it was
    capabilities: Capabilities | None


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(
        commands, "devices", "Show which providers this machine can use, and what runs where.", run
    )
    parser.add_argument(
        "artifact",
        metavar="ARTIFACT",
        type=Path,
        nargs="?",
        help="load it on each provider and show which operators run where",
    )
    parser.add_argument("--provider", help="of ARTIFACT: load it on this one only")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Probe every provider, or load the artifact on them, and print what was found."""
    if options.artifact is None:
        if options.provider is not None:
            raise ProviderError(
                f"--provider {options.provider} says where to load an artifact; name one, or "
                "leave the option out to see all providers"
            )
        _show_machine(as_json=options.json)
        return 0
    found = _load(options.artifact, options.provider)
    if options.json:
        _print_json({"artifact": str(options.artifact), "providers": [_plain(o) for o in found]})
    else:
        print("\n".join(line for one in found for line in _placement_lines(one)))
    return 0 if any(one.capabilities for one in found) else NOTHING_LOADED


def _show_machine(*, as_json: bool) -> None:
    """Print the providers, ONNX Runtime's own view, and what is wrong."""
    from onnxport.providers.ort_devices import find_onnxruntime
    from onnxport.providers.registry import probe_all

    probes, runtime = probe_all(), find_onnxruntime()
    if as_json:
        own = asdict(runtime)
        problems = own.pop("problems")
        providers = [{"provider": name, **asdict(probe)} for name, probe in probes]
        _print_json({"providers": providers, "onnxruntime": own, "problems": problems})
        return
    lines = [line for name, probe in probes for line in _probe_lines(name, probe)]
    print("\n".join([*lines, "", *_runtime_lines(runtime)]))


def _load(path: Path, provider: str | None) -> list[Loaded]:
    """Load the artifact on each provider, one after the other; on the one that is named, if any.

    Raises:
        ArtifactError: `path` is not a valid artifact.
        ProviderError: the provider that was named cannot run it.
        CapacityError: it does not fit the memory of the provider that was named.
    """
    from onnxport.graphs.artifact import Artifact
    from onnxport.providers.base import LoadOptions
    from onnxport.providers.registry import open_model, probe_all

    Artifact.read(path)  # what is wrong with it is not a provider's fault
    found: list[Loaded] = []
    probes = probe_all() if provider is None else []
    names = [provider] if provider is not None else [name for name, _ in probes]
    missing = {name: probe.reason for name, probe in probes if not probe.available}
    for name in names:
        if name in missing:
            found.append(Loaded(name, missing[name], None))
            continue
        try:
            model = open_model(path, name, LoadOptions(kv_cache_tokens=CACHE_TOKENS))
        except (ProviderError, CapacityError) as error:
            if provider is not None:
                raise
            found.append(Loaded(name, str(error), None))
        else:
            found.append(Loaded(model.capabilities.provider, "", model.capabilities))
            model.close()
    return found


def _plain(one: Loaded) -> dict[str, Any]:
    """Return what became of an artifact as JSON types; what depends on the cache is left out."""
    loaded = one.capabilities
    return {
        "provider": one.provider,
        "loaded": loaded is not None,
        "reason": one.reason,
        "device": loaded and loaded.device,
        "emulated": loaded and loaded.emulated,
        "attention": loaded and loaded.attention,
        "compute_dtype": loaded and loaded.compute_dtype,
        "kv_cache_dtype": loaded and loaded.kv_cache_dtype,
        "block_size": loaded and loaded.block_size,
        "max_batch_rows": loaded and loaded.max_batch_rows,
        "max_batch_tokens": loaded and loaded.max_batch_tokens,
        "placement": loaded and dict(loaded.placement),
        "on_host": loaded and dict(loaded.on_host),
    }


def _print_json(content: Mapping[str, Any]) -> None:
    print(json.dumps({"format": FORMAT, **content}, indent=2))


def _probe_lines(name: str, probe: Probe) -> Iterator[str]:
    """Yield what to print about one provider."""
    indent = " " * 15
    if not probe.available:
        yield f"{name:<10} no   {probe.reason}"
    else:
        versions = ", ".join(f"{library} {version}" for library, version in probe.versions.items())
        yield f"{name:<10} yes  {versions}"
    for device in probe.devices:
        memory = "" if device.memory_bytes is None else f", {device.memory_bytes / GIB:.1f} GiB"
        yield f"{indent} {device.name} ({device.kind}{memory})"
    if probe.features is not None:
        yield (
            f"{indent} attention {', '.join(probe.features.attention)}; activations "
            f"{', '.join(probe.features.dtypes)}; KV cache "
            f"{', '.join(probe.features.kv_cache_dtypes)}"
        )
    yield from (f"{indent} note: {note}" for note in probe.notes)


def _runtime_lines(runtime: OnnxRuntime) -> Iterator[str]:
    """Yield what to print about ONNX Runtime."""
    if runtime.version is None:
        yield "ONNX Runtime cannot be imported"
    else:
        wheels = ", ".join(runtime.wheels) or "of unknown origin"
        yield f"ONNX Runtime {runtime.version} ({wheels}) finds"
    for device in runtime.devices:
        ids = f"vendor {device.vendor_id:#06x}, device {device.device_id:#06x}"
        about = ", ".join(f"{key} {value}" for key, value in device.metadata.items())
        yield (
            f"  {device.execution_provider:<26} {device.hardware_vendor} {device.hardware} ({ids})"
        )
        yield f"  {'':<26} by {device.vendor}" + (f", {about}" if about else "")
    listed = {device.execution_provider for device in runtime.devices}
    others = [name for name in runtime.execution_providers if name not in listed]
    if others:
        yield f"  and, without saying for which devices: {', '.join(others)}"
    yield from (f"problem: {problem}" for problem in runtime.problems)


def _placement_lines(one: Loaded) -> Iterator[str]:
    """Yield what to print about an artifact on one provider."""
    loaded = one.capabilities
    if loaded is None:
        yield f"{one.provider:<10} no   {one.reason}"
        return
    emulated = ", emulated" if loaded.emulated else ""
    yield f"{one.provider:<10} yes  {loaded.device}{emulated}"
    indent = " " * 15
    yield (
        f"{indent} attention {loaded.attention}, activations {loaded.compute_dtype}, KV cache "
        f"{loaded.kv_cache_dtype} in blocks of {loaded.block_size} tokens"
    )
    yield f"{indent} nodes: {_counted(loaded.placement)}"
    if loaded.on_host:
        yield f"{indent} on the host, although they work with activations: " + _counted(
            loaded.on_host
        )


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
