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
    OverloadedError,
    PlacesTakenError,
    RequestError,
    UnknownAdapterError,
)
from onnxport.serving.adapters.adapter import Adapter
from onnxport.serving.adapters.peft_config import CONFIG_FILE

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0


class Adapters(Protocol):
    """What the folder asks of the engine."""

    @property
    def adapters(self) -> Sequence[Adapter]:
        """Those that are loaded."""
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
    _own: dict[str, None] = field(default_factory=dict)  # loaded here, the longest unused first
    _asking: Counter[str] = field(default_factory=Counter)  # tasks of requests that name one
    _turns: asyncio.Lock = field(default_factory=asyncio.Lock)

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
        is_known = name in self._own or _has(engine, name)
        if not is_known and await asyncio.to_thread(self._find, name) is None:
            return
        self._hold(name)
        async with self._turns:
            if not _has(engine, name):
                path = await asyncio.to_thread(self._find, name)
                if path is not None:
                    await self._load(engine, name, path)
                    self._own[name] = None
            if name in self._own:
                self._own[name] = self._own.pop(name)

    async def _load(self, engine: Adapters, name: str, path: Path) -> None:
        while True:
            try:
                await engine.load_adapter(name, path)
            except PlacesTakenError as error:
                if not await self._make_room(engine):
                    raise OverloadedError(
                        f"the adapter {name!r} has no place now: {error}", RETRY_AFTER_S
                    ) from error
            else:
                logger.info("loaded the adapter %s from %s, as a request names it", name, path)
                return

    async def _make_room(self, engine: Adapters) -> bool:
        """Unload the one that is unused for the longest; False: all are in use, or not from here.

        Those that somebody unloaded meanwhile are no more than forgotten.
        """
        for name in [name for name in self._own if not _has(engine, name)]:
            del self._own[name]
        idle = next((name for name in self._own if not self._asking[name]), None)
        if idle is None:
            return False
        del self._own[idle]
        try:
            await engine.unload_adapter(idle)
        except UnknownAdapterError:
            logger.debug("the adapter %s was unloaded meanwhile", idle)
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


def _has(engine: Adapters, name: str) -> bool:
    return any(one.name == name for one in engine.adapters)
