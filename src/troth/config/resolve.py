"""Options + machine facts -> decisions with reasons. Pure: the same inputs give the same answer.

What depends on the model's size (rows, context, pools) is decided in ``schedule/sizing.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from troth.config.facts import MachineFacts
from troth.config.options import DType, EngineOptions, Inputs, KvDType, ModelOptions, Weights
from troth.contracts.counted import counted
from troth.contracts.names import BLOCK_TOKENS
from troth.errors import OptionError

ELEMENT_BYTES: Final[dict[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
SCALE_BYTES: Final[dict[str, int]] = {"int8": 4, "fp8": 4}
"""Of formats that keep a scale beside each key and each value of a head."""
FP8_CAPABILITY: Final = (8, 9)
"""Of the first NVIDIA generation that knows the format."""
CPU_CHUNK_TOKENS: Final = 256
GPU_CHUNK_TOKENS: Final = 2048
GPU_STEP_TOKENS: Final = 8192
CPU_MAX_ROWS: Final = 8
GPU_MAX_ROWS: Final = 256
MAX_THREADS: Final = 1024
"""Systems refuse a process more long before a number that was mistyped; the kernels would then end it."""
USABLE_SHARE: Final = 0.9
"""Of the memory that is free now; the rest is left to the system and to what we do not count."""
CPU_RESERVE_BYTES: Final = 512 * 2**20
GPU_RESERVE_BYTES: Final = 1024 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Every decision that does not need the model."""

    device: str
    dtype: DType
    kv_dtype: KvDType
    weights: Weights | None
    inputs: Inputs | None
    chunk_tokens: int
    step_tokens: int
    max_rows: int
    num_threads: int
    usable_bytes: int
    reserve_bytes: int
    decisions: tuple[str, ...]

    @property
    def is_cpu(self) -> bool:
        """Whether the model computes in main memory."""
        return self.device == "cpu"


def resolve(model: ModelOptions, engine: EngineOptions, facts: MachineFacts) -> Resolved:
    """Decide device, numbers and step sizes.

    Raises:
        OptionError: an option cannot be honoured on this machine.
    """
    why: list[str] = []
    if model.context_tokens is not None and model.context_tokens < BLOCK_TOKENS:
        raise OptionError(
            f"context_tokens must be at least {BLOCK_TOKENS}, a block of the KV cache, not {model.context_tokens}"
        )
    device = _device(model.device, facts, why)
    is_cpu = device == "cpu"
    if engine.deterministic and is_cpu:
        raise OptionError(
            "deterministic is for GPUs: on a CPU the last bits of sums depend on the tokens of a step; leave it out"
        )
    dtype: DType = model.dtype or ("float32" if is_cpu else "bfloat16")
    if model.dtype is None:
        why.append(f"activations in {dtype}: the default on {'a CPU' if is_cpu else 'a GPU'}")
    kv_dtype: KvDType = model.kv_dtype or ("float16" if is_cpu else dtype)
    if kv_dtype == "fp8" and (problem := _without_fp8(device, facts)) is not None:
        raise OptionError(f"kv_dtype fp8 {problem}; int8 takes as much memory")
    if kv_dtype in SCALE_BYTES and engine.deterministic:
        raise OptionError(f"kv_dtype {kv_dtype} is not deterministic: leave out one of the two")
    if model.kv_dtype is None and kv_dtype != dtype:
        why.append(f"KV cache in {kv_dtype}: half the memory and reading time of {dtype}")
    chunk = _at_least_1(engine, "chunk_tokens", CPU_CHUNK_TOKENS if is_cpu else GPU_CHUNK_TOKENS)
    step = _at_least_1(engine, "step_tokens", max(chunk, CPU_CHUNK_TOKENS if is_cpu else GPU_STEP_TOKENS))
    if step < chunk:
        raise OptionError(f"step_tokens {step} is below chunk_tokens {chunk}; raise it or lower chunk_tokens")
    if is_cpu:
        free, reserve = facts.available_bytes, CPU_RESERVE_BYTES
    else:
        free, reserve = facts.gpus[_gpu_index(device)].free_bytes, GPU_RESERVE_BYTES
    return Resolved(
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        weights=_weights(model, engine, dtype, device, facts, why),
        inputs=_inputs(model, dtype, device, why),
        chunk_tokens=chunk,
        step_tokens=step,
        max_rows=_at_least_1(engine, "max_rows", CPU_MAX_ROWS if is_cpu else GPU_MAX_ROWS),
        num_threads=_threads(engine, facts),
        usable_bytes=int(free * USABLE_SHARE),
        reserve_bytes=reserve,
        decisions=tuple(why),
    )


def _at_least_1(engine: EngineOptions, name: str, default: int) -> int:
    value: int | None = getattr(engine, name)
    if value is None:
        return default
    if value < 1:
        raise OptionError(f"{name} must be at least 1, not {value}; leave it out for {default}")
    return value


def _threads(engine: EngineOptions, facts: MachineFacts) -> int:
    threads = _at_least_1(engine, "threads", facts.num_cores)
    if threads > MAX_THREADS:
        raise OptionError(f"threads must be at most {MAX_THREADS}, not {threads}; leave it out for {facts.num_cores}")
    return threads


def _device(wanted: str | None, facts: MachineFacts, why: list[str]) -> str:
    if wanted is None:
        if facts.gpus:
            why.append(f"device cuda:0 ({facts.gpus[0].name}): a GPU is present")
            return "cuda:0"
        why.append("device cpu: no GPU is present")
        return "cpu"
    if wanted == "cpu":
        return wanted
    name, colon, number = wanted.partition(":")
    if name != "cuda" or (colon and not (number.isascii() and number.isdigit())):
        raise OptionError(f"device must be cpu, cuda or cuda:N, not {wanted!r}")
    index = int(number or 0)
    if index >= len(facts.gpus):
        raise OptionError(
            f"device {wanted!r} is not here: this machine shows {counted(len(facts.gpus), 'CUDA device')}; "
            "name one of them, or cpu, or leave the device out"
        )
    return f"cuda:{index}"


def _weights(
    model: ModelOptions, engine: EngineOptions, dtype: DType, device: str, facts: MachineFacts, why: list[str]
) -> Weights | None:
    if model.weights is None:
        return None
    if (problem := _without_fp8(device, facts)) is not None:
        raise OptionError(f"weights fp8 {problem}; leave it out")
    if dtype != "bfloat16":
        raise OptionError(f"weights fp8 computes in bfloat16, not {dtype}; leave out one of the two")
    if engine.deterministic:
        raise OptionError(
            "weights fp8 is not deterministic: its products have no fixed order; leave out one of the two"
        )
    why.append("weights of layers in fp8: half the memory and reading time of bfloat16")
    return model.weights


def _inputs(model: ModelOptions, dtype: DType, device: str, why: list[str]) -> Inputs | None:
    if model.inputs is None:
        return None
    if device != "cpu":
        raise OptionError(f"inputs int8 is for CPUs, not {device}; leave it out")
    if dtype != "float32":
        raise OptionError(f"inputs int8 computes in float32, not {dtype}; leave out one of the two")
    why.append("inputs of quantised layers in int8: faster prompts and batches by coarser numbers")
    return model.inputs


def _without_fp8(device: str, facts: MachineFacts) -> str | None:
    """Why a device does not compute with numbers of 8 bits; None: it does."""
    least = ".".join(map(str, FP8_CAPABILITY))
    if device == "cpu":
        return f"is for GPUs of compute capability {least} and more"
    gpu = facts.gpus[_gpu_index(device)]
    if gpu.capability < FP8_CAPABILITY:
        has = ".".join(map(str, gpu.capability))
        return f"needs a GPU of compute capability {least} and more, {device} ({gpu.name}) has {has}"
    return None


def _gpu_index(device: str) -> int:
    return int(device.partition(":")[2])
