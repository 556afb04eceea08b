"""Where files of ours lie when nobody says where. Refuses to know what is in them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def disk_cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The prompt cache's folder of this user, by the XDG base directory specification; None: there is no home."""
    base = environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored.
    path = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
    return path / "troth" / "prompt-cache" if path.is_absolute() else None
