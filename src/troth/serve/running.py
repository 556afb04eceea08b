"""The answers under way, by the ids that clients know, and what can be asked of one while it runs.

Refuses to know how they are fetched and sent. Read next: ``generation.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from troth.contracts.ports import EventStream
from troth.errors import CapabilityUnavailable
from troth.serve.errors import HttpError
from troth.serve.model import ServedModel

_SHOWN = 80
"""Characters of an unknown id that an error repeats."""


@dataclass(frozen=True, slots=True)
class _Answer:
    streams: Sequence[EventStream]
    model: ServedModel


class RunningRequests:
    """Every answer of a server that has not ended. Lives on its event loop."""

    def __init__(self) -> None:
        self._answers: dict[str, list[_Answer]] = {}

    @contextmanager
    def named(self, names: Sequence[str], streams: Sequence[EventStream], model: ServedModel) -> Iterator[None]:
        """Be known by these names meanwhile. A name that a client gives to several requests stands for all of them."""
        answer = _Answer(streams, model)
        for name in names:
            self._answers.setdefault(name, []).append(answer)
        try:
            yield
        finally:
            for name in names:
                self._answers[name].remove(answer)
                if not self._answers[name]:
                    del self._answers[name]

    async def end_reasoning(self, request: Request) -> Response:
        """Close the reasoning of a running request's answers; how many there are."""
        name = request.path_params["request_id"]
        answers = self._answers.get(name)
        if answers is None:
            raise HttpError(
                404,
                f"no request {name[:_SHOWN]!r} is running; give a completion's id, or the x-request-id of its request",
                code="request_not_found",
            )
        for answer in answers:
            if answer.model.capabilities.reasoning is None:
                reason = "the answers of this model have no reasoning that could be told from them"
                raise CapabilityUnavailable("ending reasoning", reason, param="request_id")
        streams = [stream for answer in answers for stream in answer.streams]
        for stream in streams:
            stream.end_reasoning()
        body = {"id": name, "object": "request", "answers": len(streams)}
        return Response(msgspec.json.encode(body), media_type="application/json")
