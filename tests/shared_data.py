"""Where the shared test data lies, and how a test says that it needs some of it.

The data (templates, tokenizers, small trained models) is not part of this repository. ``TROTH_SHARED_DATA`` names its
folder; the default is ``../shared/data`` beside the checkout.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("TROTH_SHARED_DATA") or Path(__file__).parents[2] / "shared" / "data")


def shared(relative: str) -> Path:
    """The path of shared data; skips the calling test by name when it is absent."""
    path = ROOT / relative
    if not path.exists():
        pytest.skip(f"shared data {relative} is not here")
    return path
