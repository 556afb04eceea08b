"""What keeps processes on one folder of the disk tier apart: a gate through which they come, and a scratch folder each.

Refuses to know what is written there (``disk_folder.py``). Locks are flock(2)'s: a process that is killed lets go of
them, so that whoever comes next can tell whose scratch folder is nobody's any more.

    folder/lock               held by a process that comes, or begins the index anew
    folder/scratch-*/lock     held by its owner while it lives
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

from troth.cache.regular_file import open_regular

_LOCK: Final = "lock"
_PREFIX: Final = "scratch-"
GATE_S: Final = 5.0
"""How long another process may take to pass."""
_PAUSE_S: Final = 0.01


@contextmanager
def gate(folder: Path) -> Iterator[None]:
    """Alone in the folder with what others must not do meanwhile. Raises OSError when another process does not pass."""
    deadline = time.monotonic() + GATE_S
    with _lock_file(folder / _LOCK) as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(f"another process has held {folder / _LOCK} for {GATE_S:g} s") from None
                time.sleep(_PAUSE_S)
        yield


class Scratch:
    """One process's place for unfinished files.

    Args:
        folder: through whose gate this process comes just now. Raises OSError.
    """

    def __init__(self, folder: Path) -> None:
        for other in folder.glob(f"{_PREFIX}*"):
            _remove_abandoned(other)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
        self._lock = _lock_file(self.path / _LOCK)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _lock_file(path: Path) -> BinaryIO:
    """A file to lock, made if it is not there, never written to. Raises OSError where something else lies there."""
    return open_regular(path, os.O_RDWR | os.O_CREAT)


def _remove_abandoned(scratch: Path) -> None:
    """Remove a scratch folder that nobody holds: one without a lock was left by who was stopped at the gate."""
    if scratch.is_symlink():
        return  # what it names is somebody's
    try:
        lock = _lock_file(scratch / _LOCK)
    except OSError:
        return  # its owner has just removed it
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # its owner is alive
        shutil.rmtree(scratch, ignore_errors=True)
