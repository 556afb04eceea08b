"""Decode speed with drafts over that without, in the same run, and how many drafts were right, by depth.

Three tasks: ``copy`` repeats a text of the prompt, ``edit`` a predicted text of which a part is changed, ``fresh``
repeats nothing. Answers must be equal with and without; a difference ends the run. The ceiling of a fixed depth is what
every draft being right would give, were a step with drafts as cheap as one without. On a busy machine ``--cpu-time``
counts the seconds that the process had a processor, with one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import troth
from benchmarks import lib
from troth import compose
from troth.answer_stream import Reply
from troth.config.options import EngineOptions, ModelOptions
from troth.contracts.speculation import DraftSourceName, Speculation
from troth.text.tokenizer import Tokenizer

TESTS = ("tests/portable/test_scheduler_drafts.py", "tests/portable/test_draft_sources.py")
TEXT = """def area(width, height):
    \"\"\"The area of a rectangle.\"\"\"
    return width * height


def volume(width, height, depth):
    \"\"\"The volume of a box.\"\"\"
    return area(width, height) * depth
"""
COPY = f"Repeat this program exactly.\n\n{TEXT}\n\nHere it is again:\n\n{TEXT[:60]}"
FRESH = "The history of the printing press begins with"


def main() -> None:
    """Measure and print."""
    parser = lib.parser(__doc__)
    parser.add_argument("--model", help="a folder or .gguf; default: the demo model")
    parser.add_argument("--device", default=None)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    lib.gate(TESTS, arguments)
    threads = 1 if arguments.cpu_time else arguments.threads
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    figures: dict[str, Any] = {}
    model = ModelOptions(model=arguments.model, device=arguments.device, context_tokens=1024)
    tokenizer = compose.load_text(compose.find(model), model).tokenizer
    with troth.Engine.open(model_options=model, engine_options=EngineOptions(threads=threads)) as engine:
        for task, prompt in {"copy": COPY, "edit": COPY, "fresh": FRESH}.items():
            figures[task] = _task(engine, tokenizer, task, prompt, arguments, clock)
        info = engine.info
    options = {"model": info.model, "device": info.device, "threads": threads, "cpu_time": arguments.cpu_time}
    lib.finish("speculate", lib.stamp(options) | {"figures": figures}, arguments)


def _task(
    engine: troth.Engine, tokenizer: Tokenizer, task: str, prompt: str, arguments: Any, clock: Callable[[], float]
) -> dict[str, dict[str, Any]]:
    """Figures of one task by way of drafting."""
    replies: dict[str, Reply] = {}
    off = engine.complete(prompt, max_tokens=arguments.tokens, temperature=0, ignore_eos=True, speculation="off")
    ways = {"off": Speculation(), "adaptive": _way(tokenizer, task, off.text)}
    ways |= {f"depth {depth}": _way(tokenizer, task, off.text, depth) for depth in arguments.depths}

    def measured(name: str) -> float:
        began = clock()
        reply = engine.complete(
            prompt, max_tokens=arguments.tokens, temperature=0, ignore_eos=True, speculation=ways[name]
        )
        seconds = clock() - began
        if reply.text != off.text:
            raise SystemExit(f"{task}, {name}: the answer differs from that without drafts")
        replies[name] = reply
        return (arguments.tokens - 1) / seconds

    runs = {name: (lambda name=name: measured(name)) for name in ways}
    speeds = lib.interleaved(runs, arguments.repetitions)
    plain = median(speeds["off"])
    found = {}
    for name, series in speeds.items():
        stats = replies[name].speculation
        depth = ways[name].depth
        lib.line(f"{task}, {name}", median(series), "tok/s", plain * (1 + depth) if depth else None, series)
        found[name] = {"tokens_per_s": median(series), "ratio": median(series) / plain}
        if stats is not None:
            rejected = stats.num_verifies - sum(stats.accepted_by_depth)
            print(
                f"    {found[name]['ratio']:.2f} times off; {stats.num_accepted} of {stats.num_drafted} right, "
                f"steps by drafts right: {[rejected, *stats.accepted_by_depth]}"
                + (f"; {stats.disabled_reason}" if stats.disabled_reason else "")
            )
            found[name] |= {"drafted": stats.num_drafted, "accepted_by_depth": stats.accepted_by_depth}
    return found


def _way(tokenizer: Tokenizer, task: str, answer: str, depth: int | None = None) -> Speculation:
    sources: tuple[DraftSourceName, ...] = ("ngram",)
    if task == "edit":
        # What came out, with a tenth of it changed in the middle: a prediction that is right but for one place.
        middle, length = len(answer) // 2, len(answer) // 10
        predicted = answer[:middle] + "#" * length + answer[middle + length :]
        ids = tuple(tokenizer.encode(predicted, add_special=False))
        return Speculation(sources=("external",), depth=depth, adaptive=depth is None, predicted_ids=ids)
    return Speculation(sources=sources, depth=depth, adaptive=depth is None)


if __name__ == "__main__":
    main()
