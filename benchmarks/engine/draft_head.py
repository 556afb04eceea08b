"""Decode speed with a model's own draft head over that without, in the same run, and how many drafts were right.

Chats come from a file of JSON lines (``messages``, perhaps ``tools`` and ``enable_thinking``), as the one beside
troth-tiny-hybrid; answers end where they end. Only seconds between the first token and the last count. Answers must be
equal with and without. The ceiling of a depth is what every draft being right would give, were drafts free and a step
with them as cheap as one without. ``--batches`` answers so many chats together. On a busy machine ``--cpu-time`` counts
the seconds that the process had a processor, with one thread, prompts included.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import troth
from benchmarks import lib
from troth.answer_stream import Reply
from troth.config.options import EngineOptions, ModelOptions
from troth.contracts.speculation import Speculation

TESTS = ("tests/cpu/test_head_drafts.py",)


def main() -> None:
    """Measure and print."""
    parser = lib.parser(__doc__)
    parser.add_argument("--model", required=True, help="a folder with a draft head")
    parser.add_argument("--chats", required=True, help="a file of chats")
    parser.add_argument("--device", default=None)
    parser.add_argument("--kv-dtype", default=None)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--num-chats", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    lib.gate(TESTS, arguments)
    threads = 1 if arguments.cpu_time else arguments.threads
    lines = Path(arguments.chats).read_text(encoding="utf-8").splitlines()
    chats = [chat for chat in map(json.loads, lines) if len(chat["expected"].get("content") or "") > 60]
    figures: dict[str, Any] = {}
    with troth.Engine.open(
        arguments.model,
        model_options=ModelOptions(device=arguments.device, kv_dtype=arguments.kv_dtype),
        engine_options=EngineOptions(threads=threads, speculation=("mtp",), speculate_uncertified=True),
    ) as engine:
        for rows in arguments.batches:
            figures[f"B{rows}"] = _batch(engine, chats[: max(rows, arguments.num_chats)], rows, arguments)
        info = engine.info
    options = {"model": info.model, "device": info.device, "threads": threads, "cpu_time": arguments.cpu_time}
    lib.finish("draft_head", lib.stamp(options) | {"figures": figures}, arguments)


def _batch(engine: troth.Engine, chats: list[dict[str, Any]], rows: int, arguments: Any) -> dict[str, Any]:
    """Figures of so many chats at a time, by way of drafting."""
    ways = {"off": Speculation(), "adaptive": Speculation(sources=("mtp",))}
    ways |= {f"depth {depth}": Speculation(sources=("mtp",), depth=depth, adaptive=False) for depth in arguments.depths}
    told: dict[str, list[Reply]] = {}

    def answer(chat: dict[str, Any], way: Speculation) -> Reply:
        return engine.chat(
            chat["messages"],
            **({"tools": chat["tools"]} if chat.get("tools") else {}),
            thinking=chat.get("enable_thinking"),
            max_tokens=arguments.tokens,
            temperature=0,
            prompt_cache=False,
            speculation=way,
        )

    def measured(name: str) -> float:
        replies: list[Reply] = []
        began, wall_s = time.process_time(), 0.0
        with ThreadPoolExecutor(rows) as pool:
            for at in range(0, len(chats), rows):
                together = list(pool.map(lambda chat: answer(chat, ways[name]), chats[at : at + rows]))
                wall_s += max(reply.timings.decode_s for reply in together)
                replies += together
        if name in told and [one.text for one in told["off"]] != [one.text for one in replies]:
            raise SystemExit(f"{name}: an answer differs from that without drafts")
        told[name] = replies
        num_tokens = sum(reply.usage.num_completion_tokens - 1 for reply in replies)
        return num_tokens / (time.process_time() - began if arguments.cpu_time else wall_s)

    speeds = lib.interleaved({name: (lambda name=name: measured(name)) for name in ways}, arguments.repetitions)
    plain, found = median(speeds["off"]), {}
    for name, series in speeds.items():
        depth = ways[name].depth
        lib.line(f"B{rows}, {name}", median(series), "tok/s", plain * (1 + depth) if depth else None, series)
        found[name] = {"tokens_per_s": median(series), "ratio": median(series) / plain}
        stats = [one.speculation for one in told[name] if one.speculation is not None]
        if stats:
            right = [sum(steps) for steps in zip_longest(*(one.accepted_by_depth for one in stats), fillvalue=0)]
            num_steps, num_right = sum(one.num_verifies for one in stats), sum(one.num_accepted for one in stats)
            found[name] |= {"steps": num_steps, "accepted_by_depth": right}
            print(
                f"    {found[name]['ratio']:.2f} times off; {num_right} of {sum(one.num_drafted for one in stats)} "
                f"right, {1 + num_right / max(1, num_steps):.2f} tokens a step with drafts, "
                f"steps by drafts right: {[num_steps - sum(right), *right]}"
            )
    return found


if __name__ == "__main__":
    main()
