"""Files that are files: a folder somebody can write to may hold links, pipes and devices under any name.

Refuses to know what is in them. A pipe would be waited on for ever, a device may have no end, and what a link names is
somebody's. Used by ``disk_bundle.py``, ``disk_folder.py`` and ``disk_scratch.py``.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

_SAFE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OWNER_ONLY: Final = 0o600


def open_regular(path: Path, flags: int) -> BinaryIO:
    """Open a file for reading bytes, never following a link at its end and never waiting.

    Args:
        path: of the file.
        flags: as os.open takes them; a file that is made is its owner's alone.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    opened = os.open(path, flags | _SAFE, _OWNER_ONLY)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(f"{path} is not a regular file; remove it")
    return os.fdopen(opened, "rb")


def regular_bytes(path: Path) -> int | None:
    """Bytes of a file; None where there is none that is regular."""
    try:
        about = path.lstat()
    except OSError:
        return None
    return about.st_size if stat.S_ISREG(about.st_mode) else None
