"""`onnxport export`: a checkpoint becomes an artifact."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxport.cli.arguments import EXPORT_OPTIONS, Commands, add_export_options, command
from onnxport.errors import ExportError

if TYPE_CHECKING:
    from onnxport.exporter.options import ExportOptions, Progress, ProgressCallback


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(commands, "export", "Export a checkpoint to an ONNX artifact.", run)
    parser.add_argument(
        "source", metavar="SOURCE", help="a Hugging Face folder or hub id, or a GGUF file"
    )
    parser.add_argument("destination", metavar="DEST", type=Path, help="the folder to make")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an older artifact when the new is done"
    )
    parser.add_argument(
        "--target",
        metavar="MODEL",
        help="the model, a folder or hub id, that SOURCE guesses for: an EAGLE-3 draft head",
    )
    parser.add_argument(
        "--score-template",
        metavar="FILE",
        help="how pairs of texts are written that are to be judged: a file in Jinja, or "
        "qwen3-reranker (as the checkpoint says)",
    )
    add_export_options(parser)


def run(options: argparse.Namespace) -> int:
    """Export and say what was written."""
    chosen = export_options(options, score_template=options.score_template)
    folder = export(options.source, options.destination, chosen, options.target)
    print(f"Wrote {folder}.")
    return 0


def export_options(options: argparse.Namespace, **changes: Any) -> ExportOptions:
    """Return what was asked for, and the exporter's defaults for the rest."""
    from onnxport.exporter.options import ExportOptions

    is_file = Path(options.source).is_file()
    is_local = is_file or Path(options.source).is_dir()
    if options.revision is not None and is_local:
        raise ExportError(
            f"--revision {options.revision} was given, and {options.source} is a local "
            f"{'file' if is_file else 'folder'}, which has no revisions; leave it out, or give a "
            "hub id"
        )
    target = getattr(options, "target", None)
    if options.token is not None and is_local and (target is None or Path(target).is_dir()):
        what = f"is a local {'file' if is_file else 'folder'}, which needs"
        if target is not None:
            what = f"and {target} are local folders, which need"
        raise ExportError(
            f"--token was given, and {options.source} {what} none; leave it out, or give a hub id"
        )
    given: dict[str, Any] = {name: getattr(options, name) for name in EXPORT_OPTIONS}
    given |= {"overwrite": getattr(options, "overwrite", False)} | changes
    found = ExportOptions(**{name: value for name, value in given.items() if value is not None})
    if options.group_size is not None and not found.is_quantized:
        raise ExportError(
            f"--group-size {options.group_size} was given, and nothing is quantized to "
            f"{found.projections} in groups; leave it out, or choose int4 or int8"
        )
    return found


def export(
    source: str, destination: Path, options: ExportOptions, target: str | None = None
) -> Path:
    """Export with a progress bar, and say how long it took; with a target, a draft head."""
    from onnxport.exporter.draft_head import export_head
    from onnxport.exporter.export import export_model
    from onnxport.graphs.artifact import Artifact

    start_s = time.monotonic()
    with _progress_bar() as progress:
        if target is not None:
            folder = export_head(source, target, destination, options, progress)
        else:
            folder = export_model(source, destination, options, progress)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
    experts = f" with experts in {options.expert_precision}" if options.keeps_experts else ""
    manifest = Artifact.read(folder, check_graphs=False).manifest
    wider = manifest.int8_matrices
    mixed = f", {wider} matrices to int8, as the file needs" if wider else ""
    print(
        f"Exported {source} to {manifest.precision}{experts}{mixed}: {size:,.1f} MB in "
        f"{time.monotonic() - start_s:.1f} s.",
        file=sys.stderr,
    )
    return folder


@contextmanager
def _progress_bar() -> Iterator[ProgressCallback]:
    """Give a callback that draws the progress; nothing is drawn unless a person looks."""
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True, disable=None, dynamic_ncols=True, leave=False) as bar:

        def show(progress: Progress) -> None:
            bar.total = progress.total_bytes
            bar.set_description(progress.stage, refresh=False)
            bar.update(progress.done_bytes - bar.n)

        yield show
