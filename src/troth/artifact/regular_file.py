"""Opening one file of an artifact: a regular file, opened once, known by its stamp.

Refuses to know what is inside. Directories, pipes and devices are refused without blocking on them. ``gguf.py``,
``safetensors.py`` and ``json_file.py`` read through this.
"""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from troth.errors import ModelLoadError

# A pipe opened without O_NONBLOCK would wait for a writer for ever.
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells whether a file is still the one that was read."""

    size_bytes: int
    mtime_ns: int
    inode: int


class RegularFile:
    """An open file, closed by ``with``. ``path`` must not be a symbolic link itself: resolve it first.

    Raises:
        ModelLoadError: there is no such file, it is not a regular file, or it may not be read.
    """

    __slots__ = ("_fd", "path", "stamp")

    def __init__(self, path: Path) -> None:
        try:
            fd = os.open(path, _FLAGS)
        except FileNotFoundError:
            raise ModelLoadError("there is no such file; check the path", path=str(path)) from None
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"cannot be opened: {_reason(error)}", path=str(path)) from None
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            os.close(fd)
            raise ModelLoadError("is not a regular file", path=str(path))
        self._fd = fd
        self.path = path
        self.stamp = FileStamp(info.st_size, info.st_mtime_ns, info.st_ino)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def expect(self, stamp: FileStamp) -> None:
        """Raise ModelLoadError unless the file is still the one ``stamp`` was taken of."""
        if self.stamp != stamp:
            raise ModelLoadError("changed since its header was read; load the model again", path=str(self.path))

    def map(self) -> mmap.mmap:
        """The whole file, read-only; lives on after ``with``. Raises ModelLoadError for an empty file."""
        if self.stamp.size_bytes == 0:
            raise ModelLoadError("is empty; fetch it again", path=str(self.path))
        return mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)

    def map_private(self) -> mmap.mmap:
        """The whole file, copy-on-write: nothing written to the map reaches the file.

        Without MAP_NORESERVE Linux would charge the whole map against memory and refuse a model larger than RAM.
        """
        if self.stamp.size_bytes == 0:
            raise ModelLoadError("is empty; fetch it again", path=str(self.path))
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        return mmap.mmap(self._fd, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def read_into(self, buffer: bytearray) -> int:
        """Fill ``buffer`` from the current position; the number of bytes read, 0 at the end."""
        return os.readv(self._fd, [buffer])

    def read(self, limit_bytes: int) -> bytes:
        """The whole file. Raises ModelLoadError when it is larger than ``limit_bytes``."""
        size = self.stamp.size_bytes
        if size > limit_bytes:
            raise ModelLoadError(
                f"is {size} bytes long; at most {limit_bytes} are read here", path=str(self.path)
            )
        parts: list[bytes] = []
        while size > 0 and (part := os.read(self._fd, size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
