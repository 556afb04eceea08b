"""``troth run``: one prompt, one answer."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from troth.cli.answer import show_answer, statistics, why_cut
from troth.cli.exit_code import DONE, INTERRUPTED
from troth.cli.session import ask, chat_request, sampling, session, thinking
from troth.cli.terminal import Terminal
from troth.errors import OptionError
from troth.schedule.admission import require_room

if TYPE_CHECKING:
    from troth.answer_stream import Reply
    from troth.request_builder import RequestBuilder


def run(args: Namespace, terminal: Terminal) -> int:
    """Answer the prompt. Raises TrothError."""
    if args.raw and args.system is not None:
        raise OptionError("--system needs the chat template, which --raw leaves out; drop one of them")
    thinks = thinking(args)
    if args.raw and thinks:
        raise OptionError("flags of thinking need the chat template, which --raw leaves out; drop them or it")
    options, prompt = sampling(args) | thinks, _prompt(args, terminal)
    messages = _messages(args.system, prompt)

    def check(builder: RequestBuilder, most_tokens: int) -> None:
        raw = bool(args.raw)
        request = builder.completion(prompt, options) if raw else chat_request(builder, messages, options)
        require_room(request, most_tokens)

    with session(args, terminal, check, quiet=bool(args.quiet)) as engine:
        stream = engine.stream_completion(prompt, **options) if args.raw else ask(engine, messages, options)
        reply, interrupted = show_answer(stream, terminal, quiet=bool(args.quiet), silent=bool(args.json))
        if args.json:
            terminal.line(json.dumps(_json(reply, engine.info.model), ensure_ascii=False))
        if not args.quiet:
            if (reason := why_cut(reply, args.max_tokens, engine.info.context_tokens)) is not None:
                terminal.note(reason)
            terminal.note(statistics(reply))
    return INTERRUPTED if interrupted else DONE


def _prompt(args: Namespace, terminal: Terminal) -> str:
    if args.prompt is not None and args.prompt != "-":
        prompt: str = args.prompt
    elif args.prompt is None and terminal.stdin.isatty():
        raise OptionError("no prompt: give one, pipe one in, or use troth chat")
    else:
        prompt = terminal.read_input()
        # The shell ends what it pipes with a line end that nobody meant to say; a raw prompt is taken to the byte.
        prompt = prompt if args.raw else prompt.removesuffix("\n").removesuffix("\r")
    if not prompt.strip() and not args.raw:
        raise OptionError("the prompt is empty; say something")
    return prompt


def _messages(system: str | None, prompt: str) -> list[dict[str, str]]:
    user = {"role": "user", "content": prompt}
    return [user] if system is None else [{"role": "system", "content": system}, user]


def _json(reply: Reply, model: str) -> dict[str, Any]:
    return {
        "text": reply.text,
        "reasoning": reply.reasoning,
        "finish_reason": reply.finish_reason,
        "usage": dataclasses.asdict(reply.usage),
        "timings": dataclasses.asdict(reply.timings),
        "seed": reply.seed,
        "model": model,
    }
