"""How much of a disk the prompt cache may take: a plan before the folder exists, and the rule for the one who opens it.

Refuses to know what is kept (``cache/disk_folder.py``) and whether anything is (``options.py``).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from troth.contracts.memory_plan import DiskCachePlan

QUOTA_BYTES: Final = 10 * 2**30
QUOTA_SHARE: Final = 0.1
"""Of the free disk; the smaller of the two is the default quota."""


def default_quota(free_bytes: int, used_bytes: int) -> int:
    """Most bytes of all files when nobody says how many: what the cache holds already counts as free."""
    return min(QUOTA_BYTES, int((free_bytes + used_bytes) * QUOTA_SHARE))


def plan_disk_cache(folder: Path, quota_bytes: int | None) -> DiskCachePlan:
    """What a cache in a folder would have, without making the folder; zeros where its disk cannot be asked."""
    used, free = _file_bytes(folder), _free_bytes(folder)
    return DiskCachePlan(
        folder=str(folder),
        quota_bytes=default_quota(free, used) if quota_bytes is None else quota_bytes,
        used_bytes=used,
        free_bytes=free,
    )


def _file_bytes(folder: Path) -> int:
    """Of the files that hold blocks; those of the index do not count."""
    try:
        return sum(
            file.stat(follow_symlinks=False).st_size
            for part in os.scandir(folder)
            if part.is_dir() and len(part.name) == 2
            for file in os.scandir(part)
        )
    except OSError:
        return 0


def _free_bytes(folder: Path) -> int:
    """Of the disk on which the folder is, or would be."""
    for place in (folder, *folder.absolute().parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return 0
