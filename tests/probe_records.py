"""What the probe finds in each published template, as rows to record and to compare. Reads shared data in place."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from troth.contracts.capabilities import TemplateCapabilities
from troth.text.chat_renderer import ChatRenderer
from troth.text.chat_template import ChatTemplate
from troth.text.message_form import MessageForm
from troth.text.probe_formats import RegistryReader
from troth.text.template_probe import Probe, probe_template

GOLDEN = Path(__file__).parent / "golden" / "template_probes.jsonl"


def probe_rows(index: Path) -> Iterator[dict[str, Any]]:
    """One row per template of ``templates/INDEX.json``: name, start of its SHA-256, what was proved."""
    reader = RegistryReader()
    for entry in json.loads(index.read_text(encoding="utf-8")):
        data = (index.parents[1] / entry["file"]).read_bytes()
        template = ChatTemplate(data.decode(), bos_token="<s>", eos_token="</s>", path=entry["file"])
        name = entry["file"].removeprefix("templates/")
        digest = hashlib.sha256(data).hexdigest()[:12]
        yield {"template": name, "sha256": digest, **summary(probe_template(ChatRenderer(template), reader))}


def summary(probe: Probe) -> dict[str, Any]:
    """What was proved, in names alone: nothing of a template's text. What is absent does not hold."""
    found = probe.capabilities
    row: dict[str, Any] = dict.fromkeys(_flags(found), True)
    row |= {"system": found.system} if found.system != "none" else {}
    row |= {"tool_format": found.tool_format} if found.tool_format else {}
    if found.reasoning:
        row["reasoning"] = [found.reasoning.markers, found.reasoning.kept]
    if found.thinking:
        switch = found.thinking
        row["thinking"] = [dict(switch.on), dict(switch.off), switch.kind, switch.default]
    if found.effort:
        row["effort"] = [found.effort.variable, *found.effort.levels]
    if found.media:
        row["media"] = list(found.media)
    usual = MessageForm(system=probe.form.system)
    form = {field.name: getattr(probe.form, field.name) for field in fields(MessageForm)}
    row["form"] = {name: value for name, value in form.items() if value != getattr(usual, name)}
    return row


def _flags(found: TemplateCapabilities) -> list[str]:
    return [field.name for field in fields(found) if getattr(found, field.name) is True]
