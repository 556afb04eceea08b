"""How fast files of the disk tier come back, measured when it is opened and with every file that is read.

Refuses to know what is in the files. Asked by ``disk_tier.py`` whether restoring beats computing.
"""

from __future__ import annotations

import os
import time
from hashlib import sha256
from pathlib import Path
from typing import Final

PROBE_BYTES: Final = 8 * 2**20
_WEIGHT: Final = 0.3
"""Of the newest measurement in the running mean."""
FILE_S: Final = 0.001
"""To look a file up, open it and read its header."""


class DiskSpeed:
    """Bytes per second from a file to proven tensors; a running mean."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        """0: not known yet."""

    def note(self, num_bytes: int, seconds: float) -> None:
        """Take a measurement in."""
        if num_bytes and seconds > 0:
            measured = num_bytes / seconds
            self.bytes_per_s += (measured - self.bytes_per_s) * (_WEIGHT if self.bytes_per_s else 1)

    def seconds(self, num_bytes: int, num_files: int) -> float:
        """How long reading takes; 0 while no speed is known, so that the first one is tried."""
        return num_files * FILE_S + (num_bytes / self.bytes_per_s if self.bytes_per_s else 0)

    def probe(self, scratch: Path) -> None:
        """Write a file and read it back, past the system's own cache where that can be asked for. Raises OSError."""
        path = scratch / "probe"
        try:
            with open(path, "wb") as written:
                written.write(os.urandom(PROBE_BYTES))
                written.flush()
                os.fsync(written.fileno())
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            started = time.perf_counter()
            sha256(path.read_bytes()).digest()
            self.note(PROBE_BYTES, time.perf_counter() - started)
        finally:
            path.unlink(missing_ok=True)
