"""Opening one file of an artifact: a regular file, opened once, known by its stamp.

Refuses to know what is inside. Directories, pipes and devices are refused without blocking on them.
``gguf.py``, ``safetensors.py`` and ``json_file.py`` read through this.
"""

from __future__ import annotations

import mmap
import os
import platform
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from troth.errors import ModelLoadError

# A pipe opened without O_NONBLOCK would wait for a writer for ever.
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)

# Without it Linux charges a private writable map against memory and refuses one larger than RAM. The mmap
# module names it from Python 3.13 on; the number is the kernel's own.
_IS_LINUX_64 = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if _IS_LINUX_64 else 0)


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells whether a file is still the one that was read."""

    size_bytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, info: os.stat_result) -> Self:
        """The stamp in a stat result."""
        return cls(info.st_size, info.st_mtime_ns, info.st_ino)


class RegularFile:
    """An open file, closed by ``with``. ``path`` must not be a symbolic link itself: resolve it first.

    Raises:
        ModelLoadError: there is no such file, it is not a regular file, or it may not be read.
    """

    __slots__ = ("_fd", "path", "stamp")

    def __init__(self, path: Path) -> None:
        try:
            fd = os.open(path, _OPEN_FLAGS)
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
        self.stamp = FileStamp.of(info)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def expect(self, stamp: FileStamp) -> None:
        """Raise ModelLoadError unless the file, as it is now, is the one ``stamp`` was taken of."""
        if FileStamp.of(os.fstat(self._fd)) != stamp:
            raise ModelLoadError("changed since it was first read; load the model again", path=str(self.path))

    def map_private(self) -> mmap.mmap:
        """The whole file, copy-on-write: nothing written to the map reaches the file. It lives on after ``with``.

        Raises:
            ModelLoadError: the file is empty.
        """
        if self.stamp.size_bytes == 0:
            raise ModelLoadError("is empty; fetch it again", path=str(self.path))
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        return mmap.mmap(self._fd, 0, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=prot)

    def read_into(self, buffer: bytearray) -> int:
        """Fill ``buffer`` from the current position; the number of bytes read, 0 at the end."""
        return os.readv(self._fd, [buffer])

    def read_exactly(self, num_bytes: int) -> bytes:
        """The next ``num_bytes``. Raises ModelLoadError when the file ends before: it shrank meanwhile."""
        parts: list[bytes] = []
        while num_bytes > 0:
            part = os.read(self._fd, num_bytes)
            if not part:
                raise ModelLoadError("became shorter while it was read; try again", path=str(self.path))
            parts.append(part)
            num_bytes -= len(part)
        return b"".join(parts)

    def read_whole(self, limit_bytes: int) -> bytes:
        """The whole file. Raises ModelLoadError when it is larger than ``limit_bytes``."""
        size = self.stamp.size_bytes
        if size > limit_bytes:
            raise ModelLoadError(f"is {size} bytes long; at most {limit_bytes} are read here", path=str(self.path))
        return self.read_exactly(size)


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
