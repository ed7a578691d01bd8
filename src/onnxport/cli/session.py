"""An engine in the terminal: loaded from an artifact, driven by the command itself."""

from __future__ import annotations

import argparse
import signal
from collections import deque
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from onnxport.cli.adapters import adapter_scales, read_adapters, with_slots
from onnxport.cli.arguments import load_options, trials_folder
from onnxport.cli.engine_arguments import engine_config
from onnxport.errors import ProviderError

if TYPE_CHECKING:
    from onnxport.serving.engine import Engine
    from onnxport.serving.outputs import CompletionDelta
    from onnxport.serving.request import Request


def load_engine(artifact: Path, options: argparse.Namespace, texts: Collection[str] = ()) -> Engine:
    """Load the artifact as the options say, and its adapters, which are read first.

    Args:
        artifact: its folder.
        options: of the command.
        texts: special tokens that are text here.
    """
    from onnxport.cli.adapter_files import read_adapter
    from onnxport.serving.loading import open_engine

    adapters = read_adapters(artifact, options)
    engine = open_engine(
        artifact,
        options.provider,
        with_slots(load_options(options), options, adapters),
        engine_config(options),
        fallback=options.fallback,
        trials=trials_folder(options),
        texts=texts,
    )
    engine.adapters.reader = read_adapter
    try:
        for name, content in adapters:
            engine.adapters.load(name, content)
        if scales := adapter_scales(options):
            engine.adapters.set_scales(scales)
    except BaseException:
        engine.close()
        raise
    return engine


@contextmanager
def open_session(
    artifact: Path, options: argparse.Namespace, texts: Collection[str] = ()
) -> Iterator[Engine]:
    """Give an engine over the artifact, see `load_engine`; it is closed at the end."""
    engine = load_engine(artifact, options, texts)
    try:
        yield engine
    finally:
        engine.close()


def deltas(engine: Engine, requests: Sequence[Request]) -> Generator[CompletionDelta]:
    """Run requests and yield what each step adds; closing the iterator aborts them.

    They are submitted as the queue has room for them.

    Raises:
        ProviderError: a request failed.
    """
    coming = deque(requests)
    try:
        while coming or engine.has_work:
            while coming and engine.queue_room(coming[0].options) > 0:
                engine.submit(coming.popleft())
            for delta in engine.step():
                if delta.finish_reason == "error":
                    raise ProviderError(delta.error or "the engine failed; see its log")
                yield delta
    finally:
        for request in requests:
            engine.abort(request.request_id)


@dataclass(slots=True)
class Interruption:
    """Whether Ctrl-C was pressed."""

    asked: bool = False


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Note the first Ctrl-C instead of raising it, so that no step is cut in two."""
    state = Interruption()
    previous: Any = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        if state.asked:
            raise KeyboardInterrupt
        state.asked = True

    signal.signal(signal.SIGINT, note)
    try:
        yield state
    finally:
        signal.signal(signal.SIGINT, previous)
