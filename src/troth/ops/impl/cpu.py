"""The C++ kernels' side of the registry: which processor features are used, and tapes of recorded operations.

Owns the thread pool of each thread that calls, and the tape that its calls go to. The kernels themselves are
``csrc/``; the modules ``cpu_*.py`` beside this one translate tensors into addresses.

A *tape* keeps the operations of one step so that the same step can run again with other contents in the same buffers: a
decode step then costs Python one call instead of hundreds. Only ops of this provider are kept, which is why a recorded
step must be proved against an ordinary one (``run/recorded.py``); what PyTorch computed in between is known as well,
so that the proof can spoil it.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from troth.artifact.ggml_types import GgmlType
from troth.errors import OptionError
from troth.ops.layer_kv import LayerKV
from troth.ops.rows import Rows

if TYPE_CHECKING:
    from troth._cpu import Device, KvPool, StepRows, Weight
    from troth._cpu import Tape as Operations

FORMATS: Final = {
    GgmlType.Q4_0: 0,
    GgmlType.Q4_1: 1,
    GgmlType.Q5_0: 2,
    GgmlType.Q5_1: 3,
    GgmlType.Q8_0: 4,
    GgmlType.Q4_K: 5,
    GgmlType.Q5_K: 6,
    GgmlType.Q6_K: 7,
}
"""Quantised formats the kernels pack, by their number in ``csrc/arguments.h``."""
INTERFACE: Final = 11
"""Which extension these modules speak to; ``csrc/module.cpp`` says which one it is."""
AFFINE_FORMATS: Final = {(4, 32): 8, (4, 64): 9, (4, 128): 10, (8, 32): 11, (8, 64): 12, (8, 128): 13}
"""Affine groups, by bits of a code and values of a group; numbers as in FORMATS."""
DENSE_FORMATS: Final = {torch.float32: 14, torch.float16: 15, torch.bfloat16: 16}
PACKED_GROWTH: Final = 1.03
"""Largest size of a packed weight over that in a GGUF: the K formats' six-bit scales take a byte each."""
KV_TYPES: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}
_AGAIN: Final = "install Troth again, with pip's --force-reinstall --no-deps"
SEGMENT_KEYS: Final = 256
TILE_QUERIES: Final = 24


class Tape:
    """Recorded operations, and the tensors whose addresses they hold."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._kept: list[Any] = []
        self._results: list[Tensor] = []
        self._calls: list[Callable[[], None]] = []
        self._runs: list[Operations] = [self._new_run()]
        """Operations before the first of the calls, between it and the second, and so on."""

    @property
    def operations(self) -> Operations:
        """Where the next operation goes."""
        return self._runs[-1]

    def keep(self, arguments: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        """Keep what an operation reads and what it writes as long as the tape."""
        self._kept.extend(arguments)
        self._results.extend(results)

    def call(self, compute: Callable[[], None]) -> None:
        """Keep code that is called at this place whenever the tape runs."""
        self._calls.append(compute)
        self._runs.append(self._new_run())

    def run(self) -> None:
        """Run every recorded operation again, in order, on what the buffers hold now."""
        for number, operations in enumerate(self._runs):
            if number:
                self._calls[number - 1]()
            if len(operations):  # a pool meets after each operation; without one, its workers are late for the next run
                operations.run()

    @property
    def whole(self) -> Operations | None:
        """All of it as operations alone; None: code is called in between."""
        return None if self._calls else self._runs[0]

    def spoil(self) -> None:
        """Fill every result with NaN: what the tape does not compute itself will show."""
        for result in self._results:
            result.fill_(float("nan"))

    def __len__(self) -> int:
        return len(self._calls) + sum(map(len, self._runs))

    def _new_run(self) -> Operations:
        made: Operations = _module().Tape(self.device, keep=True)
        return made


class Program:
    """Tapes that the pool's threads run one after the other while this thread goes on. Only it may ask.

    Its thread keeps it, and with it all that the tapes hold, until it was finished.

    Args:
        tapes: of operations alone, made by this thread.
    """

    def __init__(self, tapes: Sequence[Tape]) -> None:
        wholes: list[Operations] = []
        for tape in tapes:
            assert tape.whole is not None, "code between operations runs in the thread that made the tape"
            assert tape.device is tapes[0].device, "tapes of two pools"
            wholes.append(tape.whole)
        self._device = tapes[0].device
        self._tapes = tapes
        _state.programs.append(self)
        self._number: int = self._device.start(wholes)

    @property
    def is_finished(self) -> bool:
        """Whether ``finish`` would return at once."""
        finished: bool = self._device.is_finished(self._number)
        return finished

    def finish(self) -> None:
        """Compute with the others until this program and all before it have ended."""
        self._device.finish(self._number)
        if self in _state.programs:
            del _state.programs[: _state.programs.index(self) + 1]


class _Unrecorded(TorchDispatchMode):
    """Notes what PyTorch computes while a tape is recorded: numbers that stay as they are when the tape runs again."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: PyTorch would load its compiler for that, 900 modules and seconds in the middle of an answer."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _state.tape is self._tape:
            given = {_address(tensor) for tensor in _tensors((args, kwargs))}
            # Constants may stay. Views and what is written in place belong to whoever made it, or to a cache.
            if given or func.name().startswith("aten::empty"):
                made = [tensor for tensor in _tensors(result) if _address(tensor) not in given]
                self._tape.keep((), tuple(tensor for tensor in made if tensor.is_floating_point()))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


BF16_SETS: Final = ("amx", "avx512bf16")
"""Instruction sets whose kernels multiply prompts in bf16."""


class _State(threading.local):
    """The pool, and where calls go: straight to the kernels, or also onto a tape.

    Each thread has its own: a pool runs one operation at a time, and engines of one process compute side by side.
    """

    def __init__(self) -> None:
        self.device: Device | None = None
        self.now: Operations | None = None
        self.tape: Tape | None = None
        self.scratch: Tensor | None = None
        self.programs: list[Program] = []
        """Started and not known to be finished, in order."""


_state: Final = _State()


def unavailable() -> str | None:
    """Why the kernels cannot be used in this installation, and what to do; None when they can."""
    try:
        module = _module()
    except ModuleNotFoundError:
        return (
            "its kernels were not built, so PyTorch computes, several times slower; install a C++ compiler "
            f"(Debian: apt install g++, macOS: xcode-select --install), then {_AGAIN}"
        )
    except ImportError as error:
        return f"its kernels were built for another system and cannot be loaded ({error}); {_AGAIN}"
    if (found := getattr(module, "INTERFACE", 1)) != INTERFACE:
        return f"its kernels were built from other sources (interface {found}, not {INTERFACE}); {_AGAIN}"
    return None


def is_broken() -> bool:
    """Whether the kernels were built and yet cannot be used: an installation that contradicts itself."""
    return importlib.util.find_spec("troth._cpu") is not None and unavailable() is not None


def about() -> str:
    """Which kernels are used, of those that this processor can run."""
    used = exact_set()
    others = [name for name in instruction_sets() if name != used]
    return f"active with {used} kernels" + (f"; this processor also runs {', '.join(others)}" if others else "")


def instruction_sets() -> list[str]:
    """Instruction sets that this processor can run and the kernels are built for, widest first."""
    names: list[str] = _module().instruction_sets()
    return names


def exact_set() -> str:
    """The widest instruction set that computes a token alike wherever it stands, which is what engines use.

    Those with bf16 products round prompts to them, and answers not: what an answer's token leaves in the cache would be
    other numbers once it is computed again as part of a prompt (docs/adr/0019).
    """
    return next(name for name in instruction_sets() if name not in BF16_SETS)


def start(num_threads: int, isa: str | None = None) -> None:
    """Make this thread's pool: ``num_threads`` threads, and the instruction set named; None: ``exact_set``.

    Raises:
        OptionError: this processor lacks the named instruction set.
    """
    names = instruction_sets()
    name = isa or exact_set()
    if name not in names:
        raise OptionError(f"this processor cannot run {name!r} kernels; it can run {', '.join(names)}")
    if _state.device is None or (_state.device.threads, _state.device.name) != (num_threads, name):
        _state.device = _module().Device(num_threads, name)
        _state.now = _module().Tape(_state.device, keep=False)
        _state.scratch = None


def description() -> str:
    """Instruction set and threads in use, for ``troth doctor``."""
    device = _device()
    return f"{device.name}, {device.threads} threads"


@contextmanager
def recording() -> Iterator[Tape]:
    """Keep every operation called inside, in addition to running it."""
    tape = Tape(_device())
    assert _state.tape is None, "a tape is being recorded already"
    _state.tape = tape
    try:
        with _Unrecorded(tape):
            yield tape
    finally:
        _state.tape = None


def start_program(*tapes: Tape) -> Program:
    """Have tapes run behind whatever was started before; what this thread computes by ops later waits for them."""
    return Program(tapes)


def call(compute: Callable[[], None], results: tuple[Tensor, ...]) -> None:
    """Run code that chooses its operations by the numbers it finds, now and again whenever the tape runs.

    Args:
        compute: reads and writes the same tensors each time.
        results: those that it fills.
    """
    tape = _state.tape
    if tape is None:
        compute()
        return
    tape.keep((), results)
    tape.call(compute)
    _state.tape = None
    try:
        compute()
    finally:
        _state.tape = tape


def operations(*arguments: Any, results: tuple[Tensor, ...]) -> Operations:
    """Where to send an operation that reads ``arguments`` and writes ``results``."""
    if _state.tape is not None:
        _state.tape.keep(arguments, results)
        return _state.tape.operations
    if _state.now is None:
        start(torch.get_num_threads())
        assert _state.now is not None
    return _state.now


def product_scratch(weight: Weight, num_exact: int, num_tokens: int) -> Tensor | None:
    """uint8 [bytes] for a product's rounded inputs, shared by all threads; None: each thread rounds for itself."""
    num_bytes = _device().scratch_bytes(weight, num_exact, num_tokens)
    return torch.empty(num_bytes, dtype=torch.uint8) if num_bytes else None


def new_weight(inputs: int) -> Weight:
    """A weight without rows yet."""
    weight: Weight = _module().Weight(inputs)
    return weight


def group_bytes(format_number: int, inputs: int) -> int:
    """Bytes of 16 packed rows."""
    num_bytes: int = _module().group_bytes(format_number, inputs)
    return num_bytes


def pack_rows(format_number: int, rows: Tensor, num_rows: int, inputs: int, packed: Tensor) -> None:
    """Lay quantised rows in file layout, uint8 [O, bytes per row], out in groups of 16 (``csrc/packed.h``)."""
    _device().pack(format_number, rows.data_ptr(), rows.stride(0), num_rows, inputs, packed.data_ptr())


def kv_pool(kv: LayerKV) -> KvPool:
    """A layer's keys and values for kernels: blocks lie anywhere, one distance apart. Holds addresses only."""
    k_scale_NKS, v_scale_NKS = kv.k_scale_NKS, kv.v_scale_NKS
    made: KvPool = _module().KvPool(
        kv.k_NKDS.data_ptr(),
        kv.v_NKSD.data_ptr(),
        0 if k_scale_NKS is None else k_scale_NKS.data_ptr(),
        0 if v_scale_NKS is None else v_scale_NKS.data_ptr(),
        KV_TYPES[kv.k_NKDS.dtype],
        kv.k_NKDS.shape[1],
        kv.k_NKDS.stride(0),
        0 if k_scale_NKS is None else k_scale_NKS.stride(0),
    )
    return made


def step_rows(rows: Rows, trail_tokens: int) -> StepRows:
    """The rows of a step for kernels that keep a state per row, with trails of so many drafts. Holds addresses only."""
    recall_R = rows.recall_R
    made: StepRows = _module().StepRows(
        rows.row_R.data_ptr(),
        rows.query_start_R1.data_ptr(),
        rows.context_len_R.data_ptr(),
        0 if recall_R is None else recall_R.data_ptr(),
        rows.num_rows,
        rows.num_single,
        rows.num_verifies,
        trail_tokens,
    )
    return made


def attention_scratch(head_dim: int) -> tuple[Tensor, int]:
    """Workspace of the pool, and floats per thread. Shared by every call: its operations run one after another."""
    floats = TILE_QUERIES * (SEGMENT_KEYS + head_dim)
    needed = floats * _device().threads
    if _state.scratch is None or _state.scratch.numel() < needed:
        _state.scratch = torch.empty(needed)
    return _state.scratch, floats


def _device() -> Device:
    if _state.device is None:
        start(torch.get_num_threads())
        assert _state.device is not None
    return _state.device


def _module() -> Any:
    return importlib.import_module("troth._cpu")
