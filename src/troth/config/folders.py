"""Where files of ours lie when nobody says where. Refuses to know what is in them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def disk_cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The prompt cache's folder of this user; None: there is no home."""
    return _under_cache("prompt-cache", environ)


def certificates_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where certificates of draft heads lie; None: there is no home."""
    return _under_cache("certificates", environ)


def _under_cache(name: str, environ: Mapping[str, str]) -> Path | None:
    """By the XDG base directory specification."""
    base = environ.get("XDG_CACHE_HOME", "")
    # The specification has relative paths ignored.
    path = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
    return path / "troth" / name if path.is_absolute() else None
