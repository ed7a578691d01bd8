"""`onnxport verify`: does this machine compute what the export recorded?"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxport.cli.arguments import Commands, add_load_options, command, load_options
from onnxport.errors import ProviderError

if TYPE_CHECKING:
    from onnxport.serving.verify import Comparison, Verdict

FAILED = 1


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(
        commands, "verify", "Compare an artifact's logits with those of its export.", run
    )
    parser.add_argument("artifact", metavar="ARTIFACT", type=Path)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_load_options(parser)
    parser.set_defaults(provider="all")


def run(options: argparse.Namespace) -> int:
    """Verify with one provider, or with each that this machine has."""
    from onnxport.graphs.artifact import Artifact
    from onnxport.providers.registry import probe_all
    from onnxport.serving.verify import verify

    artifact = Artifact.read(options.artifact, verify="sha256")
    names = [options.provider]
    if options.provider in ("all", "auto"):
        probes = probe_all()
        names = [name for name, probe in probes if probe.available]
        if not names:
            reasons = "; ".join(f"{name}: {probe.reason}" for name, probe in probes)
            raise ProviderError(f"no provider is available here. {reasons}")
    loading = load_options(options)
    verdicts = [verdict for name in names for verdict in verify(artifact, name, loading)]
    if options.json:
        print(json.dumps([_plain(verdict) for verdict in verdicts], indent=2))
    else:
        print(f"{artifact.path.name}: files match their checksums")
        print("\n".join(line for verdict in verdicts for line in _lines(verdict)))
    return 0 if all(verdict.passed for verdict in verdicts) else FAILED


def _plain(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON types."""
    return {
        "provider": verdict.provider,
        "passed": verdict.passed,
        "device": verdict.capabilities.device,
        "attention": verdict.capabilities.attention,
        "compute_dtype": verdict.capabilities.compute_dtype,
        "placement": dict(verdict.capabilities.placement),
        "whole": asdict(verdict.whole),
        "stepwise": asdict(verdict.stepwise),
        "tolerance": asdict(verdict.tolerance),
    }


def _lines(verdict: Verdict) -> list[str]:
    """Return what to print about one provider."""
    limits, loaded = verdict.tolerance, verdict.capabilities
    return [
        f"{verdict.provider}, {limits.name}: {'ok' if verdict.passed else 'FAILED'} on "
        f"{loaded.device}, {loaded.attention} attention, {loaded.kv_cache_dtype} cache",
        f"{'':<18} max difference (std)     KL (nats)    same top token",
        _line("in one step", verdict.whole),
        _line("token by token", verdict.stepwise),
        f"  {'allowed':<16} {limits.max_diff:>20.2g} {limits.max_kl:>13.2g}",
    ]


def _line(name: str, found: Comparison) -> str:
    """Return one row of the table."""
    return (
        f"  {name:<16} {found.max_diff:>20.2g} {found.max_kl:>13.2g} {found.top1_agreement:>17.0%}"
    )
