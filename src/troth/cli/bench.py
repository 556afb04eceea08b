"""``troth bench``: how fast a model is here, and with ``--speculate`` what drafts make of it.

Read next: ``bench_runs.py`` (what is measured).
"""

from __future__ import annotations

import dataclasses
import json
import time
from argparse import Namespace
from typing import TYPE_CHECKING, Any, Final

from troth.cli.bench_runs import SHORT_PROMPT, DraftedFigure, Figure, drafted_exercises, drafted_speed, num_runs, speeds
from troth.cli.exit_code import DONE
from troth.cli.progress import Progress
from troth.cli.session import session
from troth.cli.table import table
from troth.cli.terminal import Terminal
from troth.errors import OptionError

if TYPE_CHECKING:
    from troth.contracts.ports import EngineInfo
    from troth.request_builder import RequestBuilder

PROMPT_TOKENS: Final = 512
TOKENS: Final = 64
REPETITIONS: Final = 3
POLL_S: Final = 0.05
_NUMBERS: Final = (1, 2)


def run(args: Namespace, terminal: Terminal) -> int:
    """Load, measure and show. Raises TrothError."""
    prompt_tokens, num_tokens = args.prompt_tokens or PROMPT_TOKENS, args.tokens or TOKENS
    repetitions, rows = args.repetitions or REPETITIONS, args.max_rows or 1

    def check(builder: RequestBuilder, most_tokens: int) -> None:
        _require_room(prompt_tokens, num_tokens, most_tokens)

    with session(args, terminal, check) as engine:
        info = engine.info
        _require_room(prompt_tokens, num_tokens, info.context_tokens)
        with Progress(terminal, "compiling kernels"):
            while not engine.has_rehearsed:
                time.sleep(POLL_S)
        with Progress(terminal, "measuring") as progress:
            total, done = num_runs(rows, repetitions), 0

            def told() -> None:
                nonlocal done
                done += 1
                progress("measuring", done, total)

            figures = speeds(
                engine,
                prompt_tokens=prompt_tokens,
                num_tokens=num_tokens,
                rows=rows,
                repetitions=repetitions,
                told=told,
            )
            drafted: list[DraftedFigure] = []
            if args.speculation:
                exercises = list(drafted_exercises(engine))
                total += 2 * len(exercises) * (1 + repetitions)
                drafted = [
                    drafted_speed(exercise, start, num_tokens=num_tokens, repetitions=repetitions, told=told)
                    for exercise, start in exercises
                ]
    if args.json:
        terminal.line(json.dumps(_json(info, figures, drafted), indent=2, ensure_ascii=False))
        return DONE
    numbers = f"computing in {info.dtype} with a KV cache in {info.kv_dtype}"
    numbers += "".join(
        f", {what} in {form}" for what, form in (("weights", info.weights), ("inputs", info.inputs)) if form
    )
    terminal.line(f"{info.model}: {info.family} on {info.device}, {numbers}; loaded in {info.load_s:.1f} s")
    terminal.line("")
    shown = [*figures, *(figure for one in drafted for figure in (one.off, one.drafted))]
    for line in table([("tokens per second", "median", "range"), *map(_row, shown)], right=_NUMBERS, header=True):
        terminal.line(line)
    for one in drafted:
        terminal.line("")
        for line in _verdict(one):
            terminal.line(line)
    return DONE


def _require_room(prompt_tokens: int, num_tokens: int, context_tokens: int) -> None:
    longest = max(prompt_tokens, SHORT_PROMPT)
    needed = longest + num_tokens + 1
    if needed > context_tokens:
        raise OptionError(
            f"--tokens {num_tokens} after prompts of up to {longest} tokens (--prompt-tokens) take {needed} tokens, "
            f"more than the context of {context_tokens}; ask for fewer"
        )


def _row(figure: Figure) -> tuple[str, str, str]:
    lowest, highest = min(figure.tokens_per_s), max(figure.tokens_per_s)
    return figure.name, _number(figure.median), f"{_number(lowest)} to {_number(highest)}"


def _number(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 1000 else f"{speed:.1f}"


def _verdict(one: DraftedFigure) -> list[str]:
    stats = one.stats
    right = f"{stats.num_accepted} of {stats.num_drafted} were right"
    lines = [f"{one.exercise}: {one.ratio:.2f} times as fast with drafts; {right}"]
    if stats.num_verifies:
        counts = [stats.num_verifies - sum(stats.accepted_by_depth), *stats.accepted_by_depth]
        lines.append("steps by drafts that were right: " + ", ".join(f"{i}: {n}" for i, n in enumerate(counts)))
    if stats.disabled_reason is not None:
        lines.append(stats.disabled_reason)
    return lines


def _json(info: EngineInfo, figures: list[Figure], drafted: list[DraftedFigure]) -> dict[str, Any]:
    return {
        "model": info.model,
        "family": info.family,
        "device": info.device,
        "dtype": info.dtype,
        "kv_dtype": info.kv_dtype,
        "weights": info.weights,
        "inputs": info.inputs,
        "load_s": info.load_s,
        "figures": [{"name": figure.name, "tokens_per_s": figure.tokens_per_s} for figure in figures],
        "speculation": [
            {
                "exercise": one.exercise,
                "tokens_per_s_off": one.off.tokens_per_s,
                "tokens_per_s": one.drafted.tokens_per_s,
                "ratio": one.ratio,
                "stats": dataclasses.asdict(one.stats),
            }
            for one in drafted
        ],
    }
