"""The messages between a server and its engine processes, and their bytes.

Refuses to know sockets and processes: bytes in, typed messages out, and back. Read next: ``engine_process.py``.

A frame is one MessagePack array: the message's number, then its fields in order; contract dataclasses inside it are
maps keyed by field name. A frame that does not decode to exactly one known message raises StreamProtocol.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from troth.contracts.events import Completed, Event, Failed, Prefill, Queued, Segment
from troth.contracts.ports import EngineInfo, EngineStatus
from troth.contracts.request import Request
from troth.contracts.tools import ToolCall, ToolCallDelta, ToolError
from troth.errors import StreamProtocol

WIRE_VERSION: Final = 5
"""Raised by one with every change of a message or of a contract dataclass inside one."""

BEAT_S: Final = 1.0
"""How often an engine process shows that it lives, and the server looks whether it did."""

WINDOW_EVENTS: Final = 32
WINDOW_TOKENS: Final = 256
"""Most events and tokens of one request that may be under way to its consumer."""


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Start a request. ``stream`` is the server's number for its events, never used twice."""

    stream: int
    request: Request


class Credit(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """(stream, events, tokens) that consumers have taken: as many more may be sent."""

    grants: list[tuple[int, int, int]]


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Stop a request; its stream still ends with Completed or Failed."""

    stream: int
    reason: str


class EndReasoning(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Close the reasoning of a request's answer now, or as it begins."""

    stream: int


class AskStatus(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Ask for the engine's status; the answer carries the same ``ask``."""

    ask: int


class Unpin(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Let the prompt pinned by this name go."""

    name: str


class Close(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Stop the engine, send what is left, then Closed, and exit."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The first message of an engine process. ``token`` proves that it is the one this server started.

    Its layout never changes, so that any two versions can tell each other apart.
    """

    version: int
    token: str
    pid: int


class Loading(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Progress before Ready: ``done`` of ``total`` units of ``stage``; ``total`` 0 means unknown."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """The engine takes requests."""

    info: EngineInfo


class LoadFailed(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """The engine could not be built; the process exits. ``kind`` names the class in ``troth.errors``."""

    kind: str
    message: str


class QueuedItem(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """A Queued event of one stream."""

    stream: int
    event: Queued


class PrefillItem(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """A Prefill event of one stream."""

    stream: int
    event: Prefill


class SegmentItem(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """A Segment event of one stream."""

    stream: int
    event: Segment


class CompletedItem(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """The Completed event that ends one stream."""

    stream: int
    event: Completed


class FailedItem(msgspec.Struct, frozen=True, array_like=True, tag=24):
    """The Failed event that ends one stream."""

    stream: int
    event: Failed


class CallDeltaItem(msgspec.Struct, frozen=True, array_like=True, tag=25):
    """A ToolCallDelta event of one stream."""

    stream: int
    event: ToolCallDelta


class CallItem(msgspec.Struct, frozen=True, array_like=True, tag=26):
    """A ToolCall event of one stream."""

    stream: int
    event: ToolCall


class CallErrorItem(msgspec.Struct, frozen=True, array_like=True, tag=27):
    """A ToolError event of one stream."""

    stream: int
    event: ToolError


Item = QueuedItem | PrefillItem | SegmentItem | CallDeltaItem | CallItem | CallErrorItem | CompletedItem | FailedItem

_ITEM_OF: Final[dict[type, type[Item]]] = {
    Queued: QueuedItem,
    Prefill: PrefillItem,
    Segment: SegmentItem,
    ToolCallDelta: CallDeltaItem,
    ToolCall: CallItem,
    ToolError: CallErrorItem,
    Completed: CompletedItem,
    Failed: FailedItem,
}


class Events(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """Events of any streams, in order; usually those of one engine step."""

    items: list[Item]


class Status(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """The answer to AskStatus."""

    ask: int
    status: EngineStatus


class Alive(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """A sign of life of an engine process that has nothing else to say; sent every ``BEAT_S`` once it is ready."""


class Closed(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """The last message of an engine process that was asked to close."""


ToEngine = Submit | Credit | Cancel | EndReasoning | Unpin | AskStatus | Close
ToServer = Hello | Loading | Ready | LoadFailed | Events | Status | Alive | Closed

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
_Message = TypeVar("_Message", ToEngine, ToServer)


def item(stream: int, event: Event) -> Item:
    """Address an event to the consumer of ``stream``."""
    return _ITEM_OF[type(event)](stream, event)  # type: ignore[arg-type]


def encode(message: ToEngine | ToServer) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def decode_to_engine(frame: bytes) -> ToEngine:
    """Read a frame sent by a server. Raises StreamProtocol when it is malformed."""
    return _decode(_to_engine, frame, "the server")


def decode_to_server(frame: bytes) -> ToServer:
    """Read a frame sent by an engine process. Raises StreamProtocol when it is malformed."""
    return _decode(_to_server, frame, "the engine process")


def _decode(decoder: msgspec.msgpack.Decoder[_Message], frame: bytes, sender: str) -> _Message:
    try:
        return decoder.decode(frame)
    # Contract dataclasses validate themselves, so a frame can fail with their errors too.
    except Exception as error:
        raise StreamProtocol(
            f"malformed frame of {len(frame)} bytes from {sender}: {error}; "
            "both sides must run the same version of troth"
        ) from error
