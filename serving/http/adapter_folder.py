"""Adapters that nobody loaded by name: a request that names one has it read from a folder."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from onnxport.errors import (
    AdapterError,
    OverloadedError,
    PlacesTakenError,
    RequestError,
    UnknownAdapterError,
)
from onnxport.serving.adapters.adapter import Adapter
from onnxport.serving.adapters.peft_config import CONFIG_FILE
from onnxport.serving.calls import in_a_thread

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0


class Adapters(Protocol):
    """What the folder asks of the engine."""

    @property
    def adapters(self) -> Sequence[Adapter]:
        """Those that are loaded."""
        ...

    @property
    def has_all_adapters(self) -> bool:
        """Whether as many are loaded as may be."""
        ...

    async def load_adapter(self, name: str, path: Path, *, in_place: bool = False) -> Adapter:
        """Load one."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Let no more requests find one."""
        ...


@dataclass(slots=True)
class AdapterFolder:
    """A folder whose adapters are loaded when requests name them, and make room for each other.

    A request is the task that asks: until it is done its adapter keeps its place.

    Attributes:
        path: of the folder, which has that of PEFT, or the `.gguf` file, by each name.
    """

    path: Path
    # The numbers of those that were loaded here, the longest unused first.
    _own: dict[str, int] = field(default_factory=dict)
    _asking: Counter[str] = field(default_factory=Counter)  # tasks of requests that name one
    _coming: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # each is read once
    _going: set[str] = field(default_factory=set)  # are being unloaded

    def __post_init__(self) -> None:
        if not self.path.is_dir():
            raise RequestError(
                f"{self.path} is no folder; give the one that has the adapters (--lora-folder)"
            )

    async def load(self, engine: Adapters, name: str) -> None:
        """Have an adapter loaded, if there is one of this name.

        Raises:
            AdapterError: it cannot be read, or does not fit the model.
            CapacityError: its rank is too large, or memory is short.
            OverloadedError: requests use all adapters that could make room.
            OnnxportError: the device fails, or the engine is closed.
        """
        self._hold(name)
        if name in self._going or _number(engine, name) is None:
            # Whoever waits for it may go away, and others wait for the same.
            await asyncio.shield(self._coming.get(name) or self._begin(engine, name))
        if name in self._own:
            self._own[name] = self._own.pop(name)

    def _begin(self, engine: Adapters, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(self._load(engine, name))

        def end(_: asyncio.Task[None]) -> None:
            del self._coming[name]
            if not task.cancelled():
                task.exception()  # which those that wait have, if there still are any

        self._coming[name] = task
        task.add_done_callback(end)
        return task

    async def _load(self, engine: Adapters, name: str) -> None:
        path = await in_a_thread(lambda: self._find(name))
        while path is not None:
            # What has no place is not read.
            if engine.has_all_adapters and not await self._make_room(engine):
                raise OverloadedError(
                    f"the adapter {name!r} has no place now: as many are loaded as may be "
                    "(--max-cpu-loras, --max-loras), and requests use all that could make room; "
                    "send it again later",
                    RETRY_AFTER_S,
                )
            try:
                adapter = await engine.load_adapter(name, path)
            except PlacesTakenError:  # by another, while it was read
                continue
            except AdapterError:
                if _number(engine, name) is None:
                    raise
                return  # somebody has loaded one by this name meanwhile
            self._own[name] = adapter.number
            logger.info("loaded the adapter %s from %s, as a request names it", name, path)
            return

    async def _make_room(self, engine: Adapters) -> bool:
        """Unload the one that is unused for the longest; False: all are in use, or not from here.

        Those that somebody unloaded or replaced meanwhile are no more than forgotten.
        """
        for name in [name for name, one in self._own.items() if _number(engine, name) != one]:
            del self._own[name]
        idle = next((name for name in self._own if not self._asking[name]), None)
        if idle is None:
            return False
        del self._own[idle]
        self._going.add(idle)
        try:
            await engine.unload_adapter(idle)
        except UnknownAdapterError:
            logger.debug("the adapter %s was unloaded meanwhile", idle)
        finally:
            self._going.discard(idle)
        return True

    def _find(self, name: str) -> Path | None:
        """Return where the adapter of a name is; None: nowhere, or outside of the folder."""
        parts = name.split("/")
        if "\0" in name or "\\" in name or any(not one or one.startswith(".") for one in parts):
            return None
        folder = self.path.joinpath(*parts)
        file = folder.with_name(f"{folder.name}.gguf")
        try:
            if (folder / CONFIG_FILE).is_file():
                return folder
            return file if file.is_file() else None
        except OSError:  # a name that is too long, say
            return None

    def _hold(self, name: str) -> None:
        """Keep the place of an adapter until the request that names it has ended."""
        task = asyncio.current_task()
        assert task is not None
        self._asking[name] += 1

        def release(_: asyncio.Task[Any]) -> None:
            self._asking[name] -= 1
            if not self._asking[name]:
                del self._asking[name]

        task.add_done_callback(release)


def _number(engine: Adapters, name: str) -> int | None:
    return next((one.number for one in engine.adapters if one.name == name), None)
