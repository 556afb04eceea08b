"""``troth fit``: where the memory of a model would go under ``troth serve``, from headers, before loading."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from typing import Any, Final

from troth import compose
from troth.cli import flags
from troth.cli.exit_code import DONE, FAILED
from troth.cli.progress import Progress
from troth.cli.quantity import bytes_text
from troth.cli.table import table
from troth.cli.terminal import Terminal
from troth.config.folders import disk_cache_folder
from troth.config.nearest_plan import Change, nearest_plan
from troth.config.options import EngineOptions, ModelOptions
from troth.contracts.counted import counted
from troth.contracts.memory_plan import MemoryPlan

_NUMBERS: Final = (1,)


def run(args: Namespace, terminal: Terminal) -> int:
    """Plan and show. Raises ModelLoadError and OptionError."""
    folder = disk_cache_folder()
    model = flags.model_options(args)
    engine = flags.engine_options(args, disk_cache=None if folder is None else str(folder))
    artifact = compose.find(model)

    def plan_with(model: ModelOptions, engine: EngineOptions) -> MemoryPlan:
        return compose.plan(artifact, model, engine).plan

    with Progress(terminal, "planning"):
        planned = compose.plan(artifact, model, engine)
        plan, nearest = planned.plan, None
        if not plan.fits:
            nearest = nearest_plan(plan_with, plan, model, engine)
    if args.json:
        value = {"model": planned.name, "family": planned.recognised.family, **_json(plan)}
        value["nearest"] = {"flags": str(nearest[0]), **_json(nearest[1])} if nearest else None
        terminal.line(json.dumps(value, indent=2, ensure_ascii=False))
    else:
        terminal.line(f"{planned.name}: {planned.recognised.family} on {plan.device}, computing in {plan.dtype}")
        for line in (
            "",
            *_rows(plan),
            "",
            *_prompt_cache(plan),
            "",
            *(f"- {decision}" for decision in plan.decisions),
            "",
            *_verdict(plan, nearest),
        ):
            terminal.line(line)
    return DONE if plan.fits else FAILED


def _rows(plan: MemoryPlan) -> list[str]:
    parts = [("weights", plan.weights_bytes, "")]
    for group in plan.groups:
        blocks = f"{counted(group.num_blocks, 'block', spec=',')} of {bytes_text(group.bytes_per_block)}"
        parts.append((f"KV cache, {group.name}", group.total_bytes, blocks))
    if plan.state_bytes:
        parts.append(("recurrent state", plan.state_bytes, counted(plan.max_rows, "row")))
    if plan.num_checkpoints:
        parts.append(
            ("checkpoints", plan.checkpoint_bytes, f"{counted(plan.num_checkpoints, 'state')} to come back to")
        )
    parts += [
        ("workspace", plan.transient_bytes, "activations of one step"),
        ("reserve", plan.reserve_bytes, "left free"),
    ]
    sums = [("total", plan.total_bytes, ""), ("usable", plan.usable_bytes, "free now, less a tenth")]
    lines = table([(name, bytes_text(num), note) for name, num, note in (*parts, *sums)], right=_NUMBERS)
    lines.insert(len(parts), "-" * max(map(len, lines)))
    return lines


def _prompt_cache(plan: MemoryPlan) -> list[str]:
    """Where the prompt cache lies: within the sums above, and on disk."""
    rows = [
        ("prompt cache in memory", bytes_text(plan.prompt_cache_bytes), "what requests leave of cache and checkpoints")
    ]
    disk = plan.disk_cache
    if disk is None:
        rows.append(("prompt cache on disk", "off", ""))
    else:
        held = f"{bytes_text(disk.used_bytes)} used, {bytes_text(disk.free_bytes)} free on the disk of {disk.folder}"
        rows.append(("prompt cache on disk", bytes_text(disk.quota_bytes), held))
    lines = table(rows, right=_NUMBERS)
    if disk is not None and not disk.fits:
        lines.append("The disk has not so much room; lower --disk-cache-size, or free some.")
    return lines


def _verdict(plan: MemoryPlan, nearest: tuple[Change, MemoryPlan] | None) -> list[str]:
    if plan.fits:
        return [f"It fits: {_capacity(plan)}."]
    lines = [f"It does not fit: {bytes_text(plan.total_bytes)} wanted, {bytes_text(plan.usable_bytes)} usable."]
    if nearest is None:
        return [*lines, "Nothing this command can change makes it fit. Free memory, or take a smaller model."]
    change, fitting = nearest
    return [*lines, f"It would fit with {change}: {bytes_text(fitting.total_bytes)}, {_capacity(fitting)}."]


def _capacity(plan: MemoryPlan) -> str:
    return (
        f"{counted(plan.max_rows, 'row')}, context {plan.context_tokens:,} of {plan.declared_context_tokens:,} tokens"
    )


def _json(plan: MemoryPlan) -> dict[str, Any]:
    totals = {"kv_bytes": plan.kv_bytes, "total_bytes": plan.total_bytes, "fits": plan.fits}
    totals["prompt_cache_bytes"] = plan.prompt_cache_bytes
    return dataclasses.asdict(plan) | totals
