"""`onnxport verify`: do all providers here give the same answers from these files, and how fast?"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from onnxport.cli.arguments import Commands, add_load_options, command, load_options
from onnxport.version import __version__

if TYPE_CHECKING:
    from onnxport.providers.base import LoadOptions, Probe
    from onnxport.serving.verify.report import ProviderReport
    from onnxport.serving.verify.verifier import Verifier

FAILED = 1
ATTENTION = ("native", "custom", "decomposed")  # providers.features has the type
ALL = ("all", "auto")
RECORDED = (  # options that decide what is verified, in the order in which `command` names them
    "provider",
    "attention",
    "dtype",
    "kv_cache_dtype",
    "kv_cache_tokens",
    "kv_memory",
    "max_model_len",
    "threads",
    "allow_on_host",
)
FLAGS = (
    *("emulate", "no_variants", "no_speed", "no_caches"),
    *("no_coarse_head", "no_hybrid_kv_cache"),
)


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(
        commands,
        "verify",
        "Check on every provider that an artifact gives the answers of its export, and time it.",
        run,
    )
    parser.add_argument("artifact", metavar="ARTIFACT", type=Path)
    parser.add_argument("--json", action="store_true", help="print JSON")
    group = parser.add_argument_group("checks")
    group.add_argument(
        "--emulate",
        action="store_true",
        help="run the graphs of a provider whose device is not here on the CPU",
    )
    group.add_argument(
        "--no-variants",
        action="store_true",
        help="compare logits alone: decode nothing, move no blocks",
    )
    group.add_argument("--no-speed", action="store_true", help="measure no speed")
    group.add_argument(
        "--no-caches", action="store_true", help="do not compare the types of KV cache"
    )
    add_load_options(parser)
    group.add_argument("--attention", choices=ATTENTION, help="by default the provider's best")
    parser.set_defaults(provider="all")


def run(options: argparse.Namespace) -> int:
    """Verify with one provider, or with each that there is."""
    from onnxport.cli.verify_table import lines
    from onnxport.graphs.artifact import Artifact, refuse_head
    from onnxport.serving.verify.machine import this_machine
    from onnxport.serving.verify.report import SCHEMA, Report, describe
    from onnxport.serving.verify.verifier import Checks, Verifier

    artifact = Artifact.read(options.artifact, verify="sha256")
    refuse_head(artifact)
    checks = Checks(
        variants=not options.no_variants,
        speed=not options.no_speed,
        caches=not options.no_caches,
    )
    verifier = Verifier(artifact, _load_options(options), checks)
    report = Report(
        schema=SCHEMA,
        onnxport=__version__,
        date_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command_line(options, artifact.path.name),
        machine=this_machine(),
        artifact=describe(artifact),
        providers=tuple(_verify(verifier, options)),
    )
    if options.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        print("\n".join(lines(report)))
    return 0 if report.passed else FAILED


def _verify(verifier: Verifier, options: argparse.Namespace) -> Iterator[ProviderReport]:
    """Verify with the providers that were asked for."""
    from onnxport.providers.registry import EMULATED, probe_all

    if options.provider not in ALL:
        yield verifier.verify(options.provider, emulate=options.emulate)
        return
    # Processors first: they compute in float32, and the others are compared with them.
    for name, probe in sorted(probe_all(), key=lambda found: not _is_host(found[1])):
        if not probe.available and options.emulate and name in EMULATED:
            yield verifier.verify(name, emulate=True)
        else:
            yield verifier.verify(name)


def _is_host(probe: Probe) -> bool:
    """Whether a provider is here and runs on the processor alone."""
    return probe.available and all(device.kind == "cpu" for device in probe.devices)


def command_line(options: argparse.Namespace, artifact: str) -> str:
    """The command as one would type it beside the artifact: folders are left out."""
    words = ["onnxport", "verify", artifact]
    for name in RECORDED:
        value = getattr(options, name, None)
        for one in value if isinstance(value, list) else [value]:
            if one not in (None, "auto", "all"):
                words += [f"--{name.replace('_', '-')}", str(one)]
    words += [f"--{name.replace('_', '-')}" for name in FLAGS if getattr(options, name)]
    if options.capture_graphs is not None:
        words.append("--capture-graphs" if options.capture_graphs else "--no-capture-graphs")
    return shlex.join(words)


def _load_options(options: argparse.Namespace) -> LoadOptions:
    """What every provider is told."""
    # What is verified is lowered by the code that is there.
    return replace(load_options(options), attention=options.attention, graph_cache=None)
