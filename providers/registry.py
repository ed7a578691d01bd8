"""The providers there are."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from onnxport.errors import ProviderError
from onnxport.graphs.artifact import Artifact
from onnxport.providers.base import LoadOptions, Model, Probe, Provider

AUTO = "auto"

# Name -> "module:class", in the order in which `auto` prefers them without a trial; those that
# find a GPU go before all others.
PROVIDERS = {
    "cuda": "onnxport.providers.cuda:CudaProvider",
    "migraphx": "onnxport.providers.migraphx:MIGraphXProvider",
    "directml": "onnxport.providers.directml:DirectMLProvider",
    "webgpu": "onnxport.providers.webgpu:WebGpuProvider",
    "cpu": "onnxport.providers.cpu.provider:CpuProvider",
    "openvino": "onnxport.providers.openvino.provider:OpenVinoProvider",
}
# Those that are made for the processor.
HOSTS = ("cpu", "openvino")
# Those that have devices to choose from: `openvino:gpu`.
WITH_DEVICES = ("cuda", "migraphx", "directml", "openvino", "webgpu")
# Those whose graphs can run on the CPU instead.
EMULATED = ("cuda", "migraphx", "directml", "webgpu")


def get_provider(name: str, *, emulate: bool = False) -> Provider:
    """The provider called `name`, which may end in a colon and one of its devices.

    Args:
        name: of the provider.
        emulate: run its graphs on the CPU instead of its device, see `Provider`.

    Raises:
        ProviderError: there is none of that name, or it cannot be emulated.
    """
    name, colon, device = name.partition(":")
    if colon and (name not in WITH_DEVICES or not device):
        raise ProviderError(
            f"{name}:{device} names a device; a device can be chosen for "
            f"{', '.join(WITH_DEVICES)} only, as in openvino:cpu"
        )
    if name not in PROVIDERS:
        raise ProviderError(
            f"there is no provider {name!r}; available are {', '.join(PROVIDERS)} and auto"
        )
    module, _, attribute = PROVIDERS[name].partition(":")
    factory: Callable[..., Provider] = getattr(import_module(module), attribute)
    if emulate and name not in EMULATED:
        raise ProviderError(
            f"provider {name!r} cannot be emulated; those that can are {', '.join(EMULATED)}"
        )
    given: list[str] = [device] if device else []
    return factory(*given, emulate=True) if emulate else factory(*given)


def probe_all() -> list[tuple[str, Probe]]:
    """Probe every provider, without loading a model."""
    return [(name, get_provider(name).probe()) for name in PROVIDERS]


def read_artifact(path: Path, options: LoadOptions) -> Artifact:
    """Read the artifact in `path`; its graphs later, where a cache may know them already.

    Raises ArtifactError if it is not valid.
    """
    return Artifact.read(path, check_graphs=options.graph_cache is None)


def open_model(
    path: Path | Artifact,
    provider: str = AUTO,
    options: LoadOptions | None = None,
    trials: Path | None = None,
) -> Model:
    """Read the artifact in `path` and load it.

    An explicit provider is final. `auto` chooses as `providers.selection` says, and logs why.

    Args:
        path: the artifact folder, or what was read of it.
        provider: one of the providers, or "auto".
        options: what the provider may be told.
        trials: folder of the measured trials by which `auto` chooses between providers that can
            both run the artifact; None: no trial, the first of them by preference.

    Raises:
        ArtifactError: `path` is not a valid artifact.
        ProviderError: the provider cannot run it.
        CapacityError: it does not fit the memory; for `auto`, that of at least one provider.
            For `auto`, an ExceptionGroup of all reasons is the cause of either.
    """
    chosen = options or LoadOptions()
    artifact = path if isinstance(path, Artifact) else read_artifact(path, chosen)
    if provider == AUTO:
        from onnxport.providers.selection import choose

        # A GPU in software runs on the processor too, and comes after what is made for that.
        order = sorted(PROVIDERS, key=lambda name: name not in HOSTS)
        return choose(artifact, {name: get_provider(name) for name in order}, chosen, trials)
    wanted = get_provider(provider)
    probe = wanted.probe()
    if not probe.available:
        raise ProviderError(f"provider {provider!r} is not available: {probe.reason}")
    return wanted.load(artifact, chosen)
