"""Print the packages of the ``dev`` extra, for ``make setup``."""

from __future__ import annotations

import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
print(*(package.replace(" ", "") for package in project["optional-dependencies"]["dev"]))
