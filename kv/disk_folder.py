"""The disk tier's folder: one file an entry, bounded in bytes, shared with other processes.

    <folder>/<family>/<key>.kv              an entry; the key in 64 hex digits
    <folder>/<family>/<key>.<token>.tmp     one that is being written, or that a crash left

The family is 16 hex digits of a hash of model, unit size, format version and, where layers are in
several groups, how; so models share a folder without meeting, and so do the layouts of one. Files
lie flat in it: a folder of 16 GiB holds at most some 160 000, which every file system of today
indexes.

What is decided here:

- *Least recently used* is by modification time, set on every use, so the order outlives the
  process and is common to all that share the folder. The bound holds for the folder, whatever
  model an entry is of: the entry that goes may be another model's.
- *Other processes* may add and remove files at any time. The index is what this process knows; it
  is read from the folder at start, and again after every eighth of the capacity written. Between
  two looks each process may therefore exceed the bound by an eighth.
- *No fsync*: a power failure costs entries, which the checksum finds, and never an answer. The
  rename alone keeps a crash of the process from leaving half an entry under its name.
- *What is sound need not be of use*: the checksum says that an entry is what was written, and
  `find_fault`, which knows what the bytes mean, whether to use it. One that is not to be used is
  removed like a damaged one, and can be written anew.
- *What is not ours stays*: only files with our names, and our magic bytes or zeros in their place,
  are ever removed, and temporary files of our naming once they are an hour old, since another
  process may be writing.
- *Access* is what the umask makes it. K/V tell what the prompts said: guard the folder like them.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from onnxport.errors import CapacityError, OnnxportError
from onnxport.kv.disk_file import (
    MAGIC,
    CorruptFileError,
    DiskFormat,
    Entry,
    ForeignFileError,
    decode,
    encode,
    starts_like_an_entry,
)
from onnxport.kv.disk_index import DiskIndex

logger = logging.getLogger(__name__)

TEMPORARY_AGE_S: Final = 3600.0  # a temporary file this old was left by a crash
_LOOKS = 8  # at the folder, per capacity written

FindFault = Callable[[Entry], str | None]  # why an entry is of no use; None: it is of use

_FAMILY = re.compile(r"[0-9a-f]{16}")
_ENTRY = re.compile(r"[0-9a-f]{64}\.kv")
_TEMPORARY = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")


def no_fault(entry: Entry) -> None:
    """Find nothing wrong with any entry."""


class DiskFolder:
    """Entries in files. One thread may call `put` while another calls everything else.

    Errors of the disk are reported in the log, once a kind, and counted; none is raised after
    construction.
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        format_: DiskFormat,
        find_fault: FindFault = no_fault,
    ) -> None:
        """Create the folder where it is missing, look through it, and make it fit the capacity.

        Args:
            folder: of the entries.
            capacity_bytes: most bytes of entries in it, of all models.
            format_: of the entries.
            find_fault: is asked of every entry that is read.

        Raises:
            CapacityError: the capacity is below one entry.
            OnnxportError: the folder cannot be created, read or written.
        """
        entry_bytes = format_.file_bytes(format_.dtype)
        if capacity_bytes < entry_bytes:
            raise CapacityError(
                f"the K/V folder {folder} may hold {capacity_bytes} bytes and one entry of this "
                f"model takes {entry_bytes}; raise kv_disk_bytes, or leave kv_disk out"
            )
        self.format = format_
        self.capacity_bytes = capacity_bytes
        self.num_errors = 0
        self._find_fault = find_fault
        self._folder = Path(folder)
        self._family = format_.family
        self._index = DiskIndex()
        self._strange: set[str] = set()  # names of files that are there and of no use
        self._unseen_bytes = 0  # written since the last look
        self._lock = threading.Lock()  # over the two below
        self._reported: set[tuple[str, int | None]] = set()
        try:
            os.makedirs(self._folder / self._family, exist_ok=True)
            probe = self._temporary(bytes(32))
            probe.touch(exist_ok=False)
            probe.unlink()
            self._look()
            self._make_room(0)
        except OSError as error:
            raise OnnxportError(
                f"the K/V folder {folder} cannot be used: {error}; name a folder that this "
                "process may create and write, or leave kv_disk out"
            ) from error

    @property
    def num_bytes(self) -> int:
        """Bytes of the entries that this process knows of, of all models."""
        return self._index.num_bytes

    def __len__(self) -> int:
        """Entries that this process knows of, of all models."""
        return len(self._index)

    def __contains__(self, key: bytes) -> bool:
        """Whether this process knows of the entry; it does not ask the disk."""
        return self._name(key) in self._index

    def path(self, key: bytes) -> Path:
        """Where the entry of `key` is, or would be."""
        return self._folder / self._name(key)

    def get(self, key: bytes) -> Entry | None:
        """Read the entry and make it the most recently used; None when it is of no use.

        A file that this process did not know of is found as well. One that is corrupt, or has a
        fault, is removed; one that is not ours is left alone. Both are reported and counted once.
        """
        name = self._name(key)
        if name in self._strange:
            return None
        path = self._folder / name
        limit = self.format.max_file_bytes
        try:
            with open(path, "rb") as file:
                data = file.read(limit + 1)
            if len(data) > limit:
                raise ForeignFileError(f"it has more than {limit} bytes")
            entry = decode(data, self.format, key)
            if fault := self._find_fault(entry):
                raise CorruptFileError(fault)
        except FileNotFoundError:
            self._index.forget(name)
            return None
        except OSError as error:
            self._failed("read", error)
            return None
        except CorruptFileError as error:
            self._give_up(name, f"{error}; it is removed")
            if self._remove(path):
                self._strange.discard(name)
            return None
        except ForeignFileError as error:
            self._give_up(name, f"{error}; it is left alone")
            return None
        self._touch(path, time.time_ns())
        self._index.use(name, len(data))
        return entry

    def put(self, key: bytes, content: bytes, dtype: str, used_ns: int) -> bool:
        """Write the entry unless its file is there, which is then marked as used.

        Args:
            key: of the entry, 32 bytes.
            content: in canonical form, of `dtype`.
            dtype: of the content's elements.
            used_ns: time of the last use, in nanoseconds since the epoch.

        Returns:
            False when the entry could not be written, which is reported and counted.
        """
        try:
            os.makedirs(self._folder / self._family, exist_ok=True)
            if not self._mark_used(key, used_ns):
                self._write(key, encode(self.format, key, content, dtype), used_ns)
        except OSError as error:
            self._failed("write", error)
            return False
        return True

    def _name(self, key: bytes) -> str:
        return f"{self._family}/{key.hex()}.kv"

    def _temporary(self, key: bytes) -> Path:
        return self._folder / self._family / f"{key.hex()}.{secrets.token_hex(8)}.tmp"

    def _mark_used(self, key: bytes, used_ns: int) -> bool:
        """Whether the entry's file is there; what is not ours under its name is not replaced."""
        name = self._name(key)
        path = self._folder / name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            self._strange.discard(name)
            return False
        if name not in self._strange:
            self._touch(path, used_ns)
            self._index.use(name, size)
        return True

    def _write(self, key: bytes, parts: tuple[bytes, ...], used_ns: int) -> None:
        size = sum(map(len, parts))
        if self._unseen_bytes + size > self.capacity_bytes // _LOOKS:
            self._look()
        self._make_room(size)
        temporary = self._temporary(key)
        try:
            with open(temporary, "xb") as file:
                for part in parts:
                    file.write(part)
            os.utime(temporary, ns=(used_ns, used_ns))
            os.replace(temporary, self.path(key))
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._unseen_bytes += size
        self._index.use(self._name(key), size)

    def _make_room(self, size: int) -> None:
        """Remove the least recently used entries until `size` bytes more fit.

        Raises:
            OSError: one cannot be removed, or the file alone exceeds the capacity.
        """
        if size > self.capacity_bytes:
            raise OSError(errno.EFBIG, "one entry is larger than the folder may be")
        while self._index.num_bytes + size > self.capacity_bytes:
            name = self._index.oldest()
            assert name is not None, "bytes without a file"
            path = self._folder / name
            try:
                with open(path, "rb") as file:
                    ours = starts_like_an_entry(file.read(len(MAGIC)))
                if ours:
                    path.unlink()
                else:
                    self._give_up(name, "it is not ours, and is left alone")
            except FileNotFoundError:
                pass  # another process was faster, and the room is there
            self._index.forget(name)

    def _look(self) -> None:
        """Learn which files there are, and remove what crashes left."""
        self._unseen_bytes = 0
        found = sorted(self._entries())
        self._index.replace((name, size) for _, name, size in found if name not in self._strange)

    def _entries(self) -> Iterator[tuple[int, str, int]]:
        """Yield modification time in ns, name and bytes of every entry, of whatever model."""
        with os.scandir(self._folder) as families:
            names = [e.name for e in families if _FAMILY.fullmatch(e.name) and e.is_dir()]
        for family in names:
            try:
                with os.scandir(self._folder / family) as files:
                    listed = list(files)
            except OSError as error:
                self._failed("list", error)
                continue
            for file in listed:
                try:
                    if _TEMPORARY.fullmatch(file.name):
                        self._remove_left(file)
                    elif _ENTRY.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                        status = file.stat()
                        yield status.st_mtime_ns, f"{family}/{file.name}", status.st_size
                except FileNotFoundError:
                    continue  # another process removed it meanwhile

    def _remove_left(self, file: os.DirEntry[str]) -> None:
        if time.time() - file.stat().st_mtime > TEMPORARY_AGE_S:
            self._remove(Path(file))

    def _touch(self, path: Path, used_ns: int) -> None:
        """Note a use; where that is not allowed, the entry keeps its place in the order."""
        try:
            os.utime(path, ns=(used_ns, used_ns))
        except FileNotFoundError:
            pass  # another process removed it after it was found: this use is over
        except OSError as error:
            self._report("mark the use of", error)

    def _remove(self, path: Path) -> bool:
        """Remove a file of ours; False when that failed, which is reported and counted."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._failed("remove", error)
            return False
        return True

    def _give_up(self, name: str, reason: str) -> None:
        """Ignore a file from now on, with one line in the log."""
        self._strange.add(name)
        self._index.forget(name)
        with self._lock:
            self.num_errors += 1
        logger.warning("%s is not used: %s", self._folder / name, reason)

    def _failed(self, action: str, error: OSError) -> None:
        """Count an error of the disk, and report it."""
        with self._lock:
            self.num_errors += 1
        self._report(action, error)

    def _report(self, action: str, error: OSError) -> None:
        """Log the first error of its kind."""
        kind = (action, error.errno)
        with self._lock:
            if kind in self._reported:
                return
            self._reported.add(kind)
        logger.warning(
            "cannot %s K/V in %s: %s; errors of this kind are not reported again",
            action,
            self._folder,
            error,
        )
