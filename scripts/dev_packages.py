"""Print the packages of the ``dev`` extra, for ``make setup``; Triton only where PyTorch did not bring its own."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]


def name_of(package: str) -> str:
    """The name before versions and conditions."""
    return re.split(r"[^\w.-]", package, maxsplit=1)[0]


brought = {name_of(package) for package in requires("torch") or ()}
packages = [package.replace(" ", "") for package in project["optional-dependencies"]["dev"]]
print(*(package for package in packages if name_of(package) not in brought))
