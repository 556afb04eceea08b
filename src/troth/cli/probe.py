"""``troth probe``: what a model's chat template was proved to do, with the evidence. Loads no weights.

Read next: ``text/template_probe.py`` (proves it), ``docs/probes.md``.
"""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from typing import Any, Final

from troth import compose
from troth.cli import flags
from troth.cli.exit_code import DONE, FAILED
from troth.cli.progress import Progress
from troth.cli.table import table
from troth.cli.terminal import Terminal
from troth.contracts.capabilities import TemplateCapabilities

_HEADER: Final = ("capability", "proved", "seen")


def run(args: Namespace, terminal: Terminal) -> int:
    """Probe and show. Raises ModelLoadError and OptionError."""
    options = flags.model_options(args)
    artifact = compose.find(options)
    with Progress(terminal, "reading the template"):
        probe = compose.load_text(artifact, options).probe
    found = probe.capabilities if probe is not None else TemplateCapabilities()
    if args.json:
        form = dataclasses.asdict(probe.form) if probe is not None else None
        value = {"model": artifact.name, "template": probe is not None, **dataclasses.asdict(found), "form": form}
        terminal.line(json.dumps(value | {"tools": found.tools}, indent=2, ensure_ascii=False))
    elif probe is None:
        terminal.line(f"{artifact.name} has no chat template; give one with --chat-template, or use completions.")
    else:
        rows = [(item.capability, "yes" if item.holds else "no", item.shown) for item in found.evidence]
        for line in (f"{artifact.name}: {_verdict(found)}", "", *table([_HEADER, *rows], header=True), ""):
            terminal.line(line)
        changed = [f"{name} {value}" for name, value in _unusual(probe.form)]
        terminal.line(f"Form of messages: {', '.join(changed) or 'the usual one'}.")
    return DONE if found.chat else FAILED


def _verdict(found: TemplateCapabilities) -> str:
    if not found.chat:
        return "cannot chat"
    said = ["chats"]
    if found.system != "none":
        said.append(f"system messages {found.system}")
    if found.tools:
        said.append(f"tools as {found.tool_format}")
    if found.reasoning is not None:
        said.append(f"reasoning as {found.reasoning.markers}")
    if found.thinking is not None:
        said.append(f"thinking can be switched by {' and '.join(found.thinking.on)}")
    if found.media:
        said.append(f"placeholders for {' and '.join(found.media)}")
    return ", ".join(said)


def _unusual(form: Any) -> list[tuple[str, Any]]:
    values = ((field.name, getattr(form, field.name), field.default) for field in dataclasses.fields(form))
    return [(name, value) for name, value, usual in values if value != usual]
