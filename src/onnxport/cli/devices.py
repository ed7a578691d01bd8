"""`onnxport devices`: which providers this machine can use, and why not the others."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from onnxport.cli.arguments import Commands, command

if TYPE_CHECKING:
    from onnxport.providers.base import Probe

GIB = 1024**3


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(commands, "devices", "Show which providers this machine can use.", run)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Probe every provider and print what was found."""
    from onnxport.providers.registry import probe_all

    probes = probe_all()
    if options.json:
        found = [{"provider": name, **_plain(probe)} for name, probe in probes]
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(line for name, probe in probes for line in _lines(name, probe)))
    return 0


def _plain(probe: Probe) -> dict[str, object]:
    """Return a probe as JSON types."""
    return {
        "available": probe.available,
        "reason": probe.reason,
        "devices": [asdict(device) for device in probe.devices],
        "versions": dict(probe.versions),
        "notes": list(probe.notes),
    }


def _lines(name: str, probe: Probe) -> list[str]:
    """Return what to print about one provider."""
    if not probe.available:
        return [f"{name:<10} no   {probe.reason}"]
    versions = ", ".join(f"{library} {version}" for library, version in probe.versions.items())
    lines = [f"{name:<10} yes  {versions}"]
    for device in probe.devices:
        memory = "" if device.memory_bytes is None else f", {device.memory_bytes / GIB:.1f} GiB"
        lines.append(f"{'':<15} {device.name}{memory}")
    return lines + [f"{'':<15} note: {note}" for note in probe.notes]
