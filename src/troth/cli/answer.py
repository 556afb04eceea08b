"""Shows one answer as it comes: its text on standard output, its progress on standard error, its reasoning to a person.

Refuses to know where the answer is from. Read next: ``interrupt.py``, ``progress.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from troth.cli.interrupt import StopOnInterrupt
from troth.cli.progress import Progress
from troth.cli.quantity import rate_text
from troth.cli.terminal import Terminal
from troth.contracts.counted import counted
from troth.contracts.events import Prefill, Queued, Segment

if TYPE_CHECKING:
    from troth.answer_stream import AnswerStream, Reply


def show_answer(
    stream: AnswerStream, terminal: Terminal, *, quiet: bool = False, silent: bool = False
) -> tuple[Reply, bool]:
    """Stream an answer to its end; returns it, and whether Ctrl-C cut it short.

    A text that does not end its line gets the end of line. Reasoning is shown dim, and only where standard output is a
    terminal: what is piped on is the answer alone. What was said before Ctrl-C is part of the reply.

    Args:
        stream: the answer; cancelled when this raises.
        terminal: where it is shown.
        quiet: show no progress.
        silent: show no text either.

    Raises:
        TrothError: what ended the request.
        BrokenPipeError: nobody reads standard output any more.
    """
    last, thinks = "\n", False
    with (
        stream,
        Progress(terminal, "reading the prompt", quiet=quiet) as progress,
        StopOnInterrupt(stream.cancel) as stop,
    ):
        try:
            for event in stream.events():
                if isinstance(event, Prefill):
                    progress("reading the prompt", event.num_done, event.num_total)
                elif not isinstance(event, Queued):
                    progress.stop()
                if not isinstance(event, Segment) or not event.text or silent:
                    continue
                if event.kind == "reasoning" and terminal.stdout.isatty():
                    terminal.write_dim(event.text)
                    last, thinks = event.text[-1], True
                elif event.kind == "text":
                    if thinks:
                        terminal.write("\n" if last == "\n" else "\n\n")
                        thinks = False
                    terminal.write(event.text)
                    last = event.text[-1]
        finally:
            if last != "\n":
                terminal.line()
    return stream.reply, stop.interrupted


def why_cut(reply: Reply, max_tokens: int | None, context_tokens: int) -> str | None:
    """Why an answer is not whole, or not there; None: it ended by itself, or somebody stopped it.

    Args:
        reply: as it came.
        max_tokens: of the answer, where somebody said so.
        context_tokens: most tokens of prompt and answer.
    """
    if reply.finish_reason != "length":
        return None
    if not reply.text and reply.reasoning:
        tokens = counted(reply.usage.num_completion_tokens, "token")
        more = "--context" if context_is_full(reply, max_tokens) else "--max-tokens"
        return f"Reasoning took all {tokens}; {more} gives the answer more, --no-thinking leaves reasoning out."
    if not context_is_full(reply, max_tokens):
        return f"The answer was cut at --max-tokens {max_tokens}."
    return f"The answer was cut: the context of {counted(context_tokens, 'token', spec=',')} is full."


def context_is_full(reply: Reply, max_tokens: int | None) -> bool:
    """Whether an answer that was cut ended where the context does: not even ``max_tokens`` had come."""
    return reply.finish_reason == "length" and (max_tokens is None or reply.usage.num_completion_tokens < max_tokens)


def statistics(reply: Reply) -> str:
    """One line: how long the prompt and the answer were and took. The first token ends the prompt's time."""
    usage, timings = reply.usage, reply.timings
    computed = usage.num_prompt_tokens - usage.num_cached_tokens
    cached = f" ({usage.num_cached_tokens} cached)" if usage.num_cached_tokens else ""
    return (
        f"prompt {counted(usage.num_prompt_tokens, 'token')}{cached}, {rate_text(computed, timings.prefill_s)}"
        f" | answer {counted(usage.num_completion_tokens, 'token')}, "
        f"{rate_text(usage.num_completion_tokens - 1, timings.decode_s)}"
        f" | first token after {timings.queued_s + timings.prefill_s:.2f} s | seed {reply.seed}"
    )
