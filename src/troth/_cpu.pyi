"""The C++ kernels (csrc/module.cpp). Addresses are not checked: use through ``troth.ops``."""

from collections.abc import Sequence

INTERFACE: int

def instruction_sets() -> list[str]: ...
def group_bytes(format: int, inputs: int, /) -> int: ...

class Weight:
    inputs: int
    outputs: int
    def __init__(self, inputs: int) -> None: ...
    def add(self, format: int, rows: int, row_bytes: int, count: int, fours: bool, /) -> None: ...

class StepRows:
    def __init__(
        self,
        ids: int,
        starts: int,
        lengths: int,
        recalls: int,
        count: int,
        single: int,
        verifies: int,
        trail_tokens: int,
        /,
    ) -> None: ...

class KvPool:
    def __init__(
        self,
        k: int,
        v: int,
        k_scale: int,
        v_scale: int,
        type: int,
        heads: int,
        stride: int,
        scale_stride: int,
        /,
    ) -> None: ...

class Device:
    threads: int
    name: str
    def __init__(self, threads: int, isa: str) -> None: ...
    def scratch_bytes(self, weight: Weight, exact: int, tokens: int, /) -> int: ...
    def pack(self, format: int, rows: int, row_bytes: int, outputs: int, inputs: int, packed: int, /) -> None: ...
    # The tapes must be kept until the program has ended; only the thread that started it may ask.
    def start(self, tapes: Sequence[Tape], /) -> int: ...
    def finish(self, program: int, /) -> None: ...
    def is_finished(self, program: int, /) -> bool: ...

class Tape:
    def __init__(self, device: Device, keep: bool) -> None: ...
    def run(self) -> None: ...
    def __len__(self) -> int: ...
    def feed(self, staged: int, inputs: int, bytes: int, tokens: int, rows: int, last: int, count: int, /) -> None: ...
    def note(self, tokens: int, rows: int, last: int, count: int, /) -> None: ...
    def linear(self, weight: Weight, bias: int, x: int, y: int, exact: int, tokens: int, scratch: int, /) -> None: ...
    def embedding(self, weight: Weight, ids: int, scale: float, y: int, tokens: int, /) -> None: ...
    def norm(
        self, x: int, residual: int, total: int, weight: int, eps: float, y: int, width: int, tokens: int, /
    ) -> None: ...
    def rotary(
        self,
        qkv: int,
        heads: int,
        head_dim: int,
        positions: int,
        cos: int,
        sin: int,
        half: int,
        q_norm: int,
        k_norm: int,
        eps: float,
        slots: int,
        kv: KvPool,
        q: int,
        tokens: int,
        /,
    ) -> None: ...
    def attention(
        self,
        q: int,
        kv: KvPool,
        heads: int,
        head_dim: int,
        tables: int,
        table_stride: int,
        starts: int,
        lengths: int,
        rows: int,
        single: int,
        scale: float,
        window: int,
        softcap: float,
        out: int,
        parts: int,
        max_segments: int,
        scratch: int,
        scratch_stride: int,
        /,
    ) -> None: ...
    def gate(self, gate_up: int, act: int, y: int, inner: int, tokens: int, /) -> None: ...
    def delta(
        self,
        qkv: int,
        key_heads: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        decay: int,
        beta: int,
        gate_stride: int,
        rate: int,
        bias: int,
        state: int,
        trail: int,
        rows: StepRows,
        out: int,
        /,
    ) -> None: ...
    def conv(
        self,
        x: int,
        stride: int,
        weight: int,
        taps: int,
        channels: int,
        silu: bool,
        state: int,
        trail: int,
        rows: StepRows,
        y: int,
        /,
    ) -> None: ...
    def gated_norm(
        self,
        x: int,
        gate: int,
        gate_stride: int,
        weight: int,
        eps: float,
        y: int,
        width: int,
        heads: int,
        tokens: int,
        /,
    ) -> None: ...
    def sample(
        self,
        logits: int,
        rows: int,
        vocab: int,
        temperature: int,
        top_k: int,
        top_p: int,
        min_p: int,
        xtc_probability: int,
        xtc_threshold: int,
        key: int,
        token: int,
        /,
    ) -> None: ...
    def finite(self, x: int, rows: int, width: int, finite: int, /) -> None: ...
    def mask(self, logits: int, vocab: int, rows: int, allowed: int, masks: int, /) -> None: ...
