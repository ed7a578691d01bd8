"""Compare onnxport with every peer that is installed: make the models, run, write the results.

    python -m benchmarks.run_all /tmp/bench --install          # peers get environments of their own
    python -m benchmarks.run_all /tmp/bench --quick            # what is there, once

The folder keeps checkpoint, models, environments (venvs/PEER), logs, results.jsonl. Started again,
it goes on where it was interrupted; with more rounds it adds them, and the results tell of which
day and code each is. In every round each peer has a turn on each of W1 to W6 and on the streams and
contexts, and onnxport one right before it: A B, A C, A B, A C. Cold starts are compared first, by
themselves: see `benchmarks.cold`.

It writes a section of benchmarks/RESULTS.md for each shape, and benchmarks/plots/*.svg.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import onnxport
from benchmarks import cold, pairs, results
from benchmarks.curves import draw
from benchmarks.pairs import OURS, Origin, Pair, Run, Store
from benchmarks.peers.registry import CHECKPOINT, PEERS, Command, Peer
from benchmarks.runner import trained_tokens
from benchmarks.shapes import SHAPES
from benchmarks.workloads import CONTEXTS, HIGHEST_ID, STREAMS, WORKLOADS
from onnxport.serving.verify.machine import Machine, this_machine
from onnxport.version import __version__

HERE = Path(__file__).parent
GIB = 1024**3
GROUPS: Mapping[str, tuple[str, ...]] = {
    "core": ("W1", "W2", "W3", "W4", "W5"),
    "streams": tuple(f"S{n}" for n in STREAMS),
    "contexts": tuple(f"C{n}" for n in CONTEXTS),
}
QUICK = {"W1", "W2", "W3", "W4", "W5", "S1", "S8", "S32", "C128", "C2048", "C8192"}
DEFAULT_ROUNDS = 3
MACHINE = {"system", "processor", "cores"}  # what of a machine a folder is for
SOURCES = ("src", "graphs", "kv", "providers", "serving", "benchmarks")
EXPORTER = ("exporter", "graphs")  # parts of the package that an artifact depends on
PARTS = (*EXPORTER, "kv", "providers", "serving", "cli")
CODE = {".py", ".so", ".dylib", ".pyd", ".dll"}


@dataclass(frozen=True, slots=True)
class Side:
    """One that is measured."""

    name: str
    python: Path
    runner: str
    model: Path
    options: tuple[str, ...] = ()

    def command(self, arguments: argparse.Namespace) -> Command:
        """How it is run, but for the workloads."""
        command = [str(self.python), "-m", self.runner, str(self.model)]
        command += ["--threads", str(arguments.threads), *self.options]
        if arguments.highest_id != HIGHEST_ID:
            command += ["--highest-id", str(arguments.highest_id)]
        if arguments.context_tokens is not None:
            command += ["--context-tokens", str(arguments.context_tokens)]
        return command


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="for all that is large")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--peers", default=",".join(PEERS), help="names with commas (all)")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="the Python of a peer's environment (FOLDER/venvs/NAME/bin/python)",
    )
    parser.add_argument("--install", action="store_true", help="make the environments not there")
    parser.add_argument(
        "--workloads", default=",".join(GROUPS), help="groups or names with commas (all groups)"
    )
    parser.add_argument("--rounds", type=int, help=f"({DEFAULT_ROUNDS}; 1 with --quick)")
    parser.add_argument(
        "--quick", action="store_true", help="one round, fewer points of each group"
    )
    parser.add_argument("--threads", type=int, help="compute threads (the physical cores)")
    parser.add_argument(
        "--kv-cache-dtype",
        default="auto",
        help="of onnxport, 16 bits where the processor has them; int8 is as OpenVINO's own choice",
    )
    parser.add_argument("--timeout", type=float, default=3600.0, help="of one process, s (3600)")
    parser.add_argument("--retry", action="store_true", help="run again what failed before")
    parser.add_argument("--results", type=Path, default=HERE / "RESULTS.md")
    parser.add_argument("--highest-id", type=int, default=HIGHEST_ID, help=argparse.SUPPRESS)
    parser.set_defaults(context_tokens=None)  # the checkpoint's, once that is there
    return parser


def groups(given: str, quick: bool) -> dict[str, list[str]]:
    """The workloads that were asked for, by what one process runs.

    Those of `core` have one each: what one leaves in a KV cache would count as the memory of the
    next, of whoever keeps his cache, and not of whoever makes another. Streams and contexts grow,
    so that each needs most. Where it has to be quick, these are fewer.
    """
    names: list[str] = []
    for one in given.split(","):
        own = GROUPS.get(one, ())
        names += [name for name in own if not quick or name in QUICK] or [one]
    if unknown := [name for name in names if name not in WORKLOADS]:
        allowed = f"{', '.join(GROUPS)}, {', '.join(WORKLOADS)}"
        sys.exit(f"no such workloads: {', '.join(unknown)}; there are {allowed}")
    wanted = dict.fromkeys(names)
    found = {name: [name] for name in wanted if name[0] == GROUPS["core"][0][0]}
    for group in ("streams", "contexts"):
        found[group] = [name for name in wanted if name[0] == GROUPS[group][0][0]]
    return {group: own for group, own in found.items() if own}


def pythons(arguments: argparse.Namespace) -> dict[str, Path]:
    """The Python of each peer, there or not."""
    given = {}
    for text in arguments.peer:
        name, found, python = text.partition("=")
        if name not in PEERS or not found:
            sys.exit(f"--peer {text}: give NAME=PYTHON; names are {', '.join(PEERS)}")
        given[name] = Path(python)
    venvs = arguments.folder / "venvs"
    return {name: given.get(name, venvs / name / "bin" / "python") for name in PEERS}


def install(peer: Peer, python: Path, log: Path) -> None:
    """Make an environment and install the peer there."""
    if not python.exists():
        call([sys.executable, "-m", "venv", str(python.parent.parent)], log)
    pip = [str(python), "-m", "pip"]
    call([*pip, "install", "--quiet", *peer.requirements], log, peer.environment)
    if peer.unneeded:
        call([*pip, "uninstall", "--quiet", "--yes", *peer.unneeded], log)


def call(command: Sequence[str], log: Path, more: Mapping[str, str] | None = None) -> None:
    """Run a command that has to succeed, and say so; what it says goes to the end of `log`."""
    print(f"$ {shlex.join(command)}", flush=True)
    environment = {**os.environ, **(more or {})}
    with log.open("a") as file:
        subprocess.run(
            command, check=True, cwd=pairs.ROOT, stdout=file, stderr=file, env=environment
        )


def same_setup(arguments: argparse.Namespace, machine: Machine) -> None:
    """Note what a folder is for; leave if it is for something else."""
    path = arguments.folder / "setup.json"
    wanted: dict[str, object] = {"shape": arguments.shape, "threads": arguments.threads}
    if arguments.kv_cache_dtype != "auto":
        wanted["kv_cache_dtype"] = arguments.kv_cache_dtype
    wanted |= {name: getattr(machine, name) for name in sorted(MACHINE)}
    if path.exists():
        found = json.loads(path.read_text())
        noted = {name: wanted[name] for name in MACHINE} | found  # older benchmarks noted none
        if noted != wanted:
            sys.exit(f"{arguments.folder} holds runs of {found}, not {wanted}; take another folder")
    path.write_text(json.dumps(wanted))


def revision(folders: Iterable[Path]) -> str:
    """Eight digits that change with the code in some folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in CODE and path.is_file():
                digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def parts(names: Iterable[str]) -> list[Path]:
    """The folders of parts of the package that runs: a checkout's, or an installed one's."""
    found = [importlib.import_module(f"{onnxport.__name__}.{name}").__path__ for name in names]
    return [Path(folder) for paths in found for folder in paths]


def make(path: Path, command: Callable[[Path], Command], log: Path) -> None:
    """Make what is not there, under another name until it is whole."""
    if path.exists():
        return
    unfinished = path.with_name(path.name + ".partial")
    if unfinished.is_dir():
        shutil.rmtree(unfinished)
    unfinished.unlink(missing_ok=True)
    call(command(unfinished), log)
    unfinished.rename(path)


def ours(arguments: argparse.Namespace) -> Side:
    """Make checkpoint and artifact, if they are not there."""
    checkpoint, artifact = arguments.folder / CHECKPOINT, arguments.folder / "artifact"
    python, log = [sys.executable, "-m"], arguments.folder / "logs" / "onnxport.log"
    shape = ["--shape", arguments.shape]
    make(checkpoint, lambda to: [*python, "benchmarks.make_checkpoint", str(to), *shape], log)
    exporter, code = artifact.with_name("exporter.txt"), revision(parts(EXPORTER))
    if artifact.exists() and (not exporter.exists() or exporter.read_text() != code):
        shutil.rmtree(artifact)  # another exporter's
    make(artifact, lambda to: [*python, "onnxport", "export", str(checkpoint), str(to)], log)
    exporter.write_text(code)
    kind = arguments.kv_cache_dtype
    kept = () if kind == "auto" else ("--kv-cache-dtype", kind)
    return Side(OURS, Path(sys.executable), "benchmarks.run_onnxport", artifact, kept)


def compile_sources(log: Path) -> None:
    """Give a checkout the bytecode that an installed package has, before a cold start is timed."""
    folders = [str(pairs.ROOT / name) for name in SOURCES]
    call([sys.executable, "-m", "compileall", "-q", *folders], log)


def peers(arguments: argparse.Namespace) -> tuple[dict[Side, str], dict[str, str]]:
    """The peers that can run, with a line that describes each; and why others cannot, by name."""
    wanted = arguments.peers.split(",")
    if unknown := [name for name in wanted if name not in PEERS]:
        sys.exit(f"no such peers: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    found = pythons(arguments)
    sides: dict[Side, str] = {}
    left: dict[str, str] = {}
    for name in wanted:
        log = arguments.folder / "logs" / f"{name}.log"
        try:
            side, about = prepared(arguments, name, found[name], log)
        except LeftOut as why:
            left[name] = str(why)
        except (subprocess.CalledProcessError, OSError) as error:
            left[name] = f"{error}; see {log}"
        else:
            sides[side] = about
        if name in left:
            print(f"{name} is left out: {left[name]}", flush=True)
    return sides, left


class LeftOut(Exception):  # noqa: N818
    """A peer is not there; the message says why."""


def prepared(arguments: argparse.Namespace, name: str, python: Path, log: Path) -> tuple[Side, str]:
    """Install a peer if that is asked for, and make its model; returns a line about it, too.

    Raises:
        LeftOut: it is not installed.
        CalledProcessError: installing it failed, or making its model.
        OSError: what does so is not there, or may not be run.
    """
    peer = PEERS[name]
    if arguments.install and peer.why_missing(python):
        install(peer, python, log)
    if why := peer.why_missing(python):
        raise LeftOut(why)
    model = arguments.folder / peer.model
    if peer.make is not None:
        make(model, partial(peer.make, python, arguments.folder / CHECKPOINT), log)
    return Side(name, python, peer.runner, model), f"{peer.versions(python)}: {peer.weights}"


def left_out(path: Path, left: Mapping[str, str], found: Iterable[str]) -> dict[str, str]:
    """Remember who was left out until they are found; folders are not told."""
    before: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    now = {name: pairs.FOLDERS.sub("", why) for name, why in left.items()}
    every = {name: why for name, why in (before | now).items() if name not in set(found)}
    path.write_text(json.dumps(every, indent=1))
    return every


def measure(
    arguments: argparse.Namespace,
    store: Store,
    side: Side,
    others: Sequence[Side],
    origins: Mapping[str, Origin],
) -> None:
    """Run every pair that is not there yet.

    Args:
        arguments: what is asked for.
        store: what is there.
        side: ours.
        others: the peers.
        origins: of each side, by name.
    """
    wanted = groups(arguments.workloads, arguments.quick)
    for number in range(arguments.rounds):
        for other in others:
            pair = Pair(number, other.name, cold.COLD)
            if store.missing(pair, [cold.COLD], retry=arguments.retry):
                print(f"round {number + 1}, cold starts: {OURS}, {other.name}", flush=True)
                commands = {one.name: one.command(arguments) for one in (side, other)}
                starts = 1 if arguments.quick else cold.STARTS
                keep(store, cold.by_turns(pair, commands, starts, arguments.timeout), origins)
        for group, workloads in wanted.items():
            for other in others:
                pair = Pair(number, other.name, group)
                missing = store.missing(pair, workloads, retry=arguments.retry)
                if not missing:
                    continue
                print(f"round {number + 1}, {group}: {OURS}, {other.name}", flush=True)
                done = [
                    pairs.run(pair, one.name, one.command(arguments), missing, arguments.timeout)
                    for one in (side, other)
                ]
                keep(store, done, origins)


def keep(store: Store, done: Sequence[Run], origins: Mapping[str, Origin]) -> None:
    """Keep the runs of a pair, and say what failed."""
    for one in done:
        if one.failed:
            print(f"  {one.side} failed: {one.failed}", flush=True)
    store.replace(done[0].pair, [replace(one, origin=origins[one.side]) for one in done])


def told(arguments: argparse.Namespace) -> str:
    """The options that decide what was measured; environments and folders are not among them."""
    names = ("shape", "peers", "workloads", "rounds", "threads")
    words = [text for name in names for text in (f"--{name}", str(getattr(arguments, name)))]
    if arguments.kv_cache_dtype != "auto":
        words += ["--kv-cache-dtype", arguments.kv_cache_dtype]
    return shlex.join([*words, *(["--quick"] if arguments.quick else [])])


def report(
    arguments: argparse.Namespace, store: Store, machine: Machine, left: Mapping[str, str]
) -> None:
    """Print the ratios; write them and the plots, and who was left out."""
    comparisons = results.compare(store.runs)
    table = list(results.table(comparisons))
    print("\n".join(table))
    plots = draw(store.runs, arguments.results.parent / "plots", arguments.shape)
    lines = [
        f"## {arguments.shape}'s shape, random weights, against every peer",
        "",
        f"{machine.processor}, {machine.cores} cores, {machine.memory_bytes / GIB:.1f} GiB, "
        f"{machine.system}; {arguments.threads} threads; {results.days(store.runs)}. Medians of "
        "the rounds. × is how many times better onnxport was than the peer, within each pair of "
        "runs; in brackets the range over the rounds.",
        "",
        *(f"    python -m benchmarks.run_all FOLDER {one}" for one in results.options(store.runs)),
        "",
        *results.sides(store.runs),
        "",
        *table,
        "",
        *(f"![{plot.stem}](plots/{plot.name})" for plot in plots),
    ]
    missing = [f"- {name} was left out: {why}" for name, why in left.items()]
    if missing := [*missing, *results.gaps(store.runs)]:
        lines += ["", "What did not run:", "", *missing]
    results.write_section(arguments.results, arguments.shape, lines)
    print(f"Wrote {arguments.results}.")


def origins(arguments: argparse.Namespace, found: Mapping[Side, str]) -> dict[str, Origin]:
    """What is noted with the runs of each side, by name."""
    kind = arguments.kv_cache_dtype
    cache = "16 bits where the processor has them" if kind == "auto" else kind
    code = f"{__version__}, code {revision([*parts(PARTS), HERE])}"
    about = {OURS: f"{code}: int4 in groups of 128, head and embedding int8; KV cache {cache}"}
    about |= {other.name: text for other, text in found.items()}
    date = datetime.now(UTC).date().isoformat()
    return {name: Origin(text, date, told(arguments)) for name, text in about.items()}


def main() -> None:
    arguments = options().parse_args()
    machine = this_machine()
    arguments.threads = arguments.threads or machine.cores
    arguments.rounds = arguments.rounds or (1 if arguments.quick else DEFAULT_ROUNDS)
    arguments.folder = arguments.folder.resolve()
    (arguments.folder / "logs").mkdir(parents=True, exist_ok=True)
    same_setup(arguments, machine)
    side = ours(arguments)
    arguments.context_tokens = trained_tokens(arguments.folder / CHECKPOINT)
    compile_sources(arguments.folder / "logs" / "onnxport.log")
    found, left = peers(arguments)
    left = left_out(arguments.folder / "left_out.json", left, [other.name for other in found])
    if not found:
        sys.exit("there is nobody to compare with; see --install and --peer")
    store = Store(arguments.folder / "results.jsonl")
    measure(arguments, store, side, list(found), origins(arguments, found))
    report(arguments, store, machine, left)


if __name__ == "__main__":
    main()
