"""Options and machine facts become decisions: defaults of CPUs and GPUs, and options no machine could honour."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from troth.config.facts import GpuFacts, MachineFacts
from troth.config.options import EngineOptions, ModelOptions
from troth.config.resolve import CPU_RESERVE_BYTES, GPU_RESERVE_BYTES, resolve
from troth.errors import OptionError

GPUS = tuple(
    GpuFacts(
        index=index,
        name=f"card {index}",
        total_bytes=80 * 2**30,
        free_bytes=(70 - 30 * index) * 2**30,
        capability=(9 - index, 0),
    )
    for index in range(2)
)
CPU_ONLY = MachineFacts(num_cores=6, total_bytes=64 * 2**30, available_bytes=40 * 2**30)
WITH_GPUS = MachineFacts(num_cores=6, total_bytes=64 * 2**30, available_bytes=40 * 2**30, gpus=GPUS)


def test_resolve_without_a_gpu_computes_on_the_cpu_and_says_why() -> None:
    decided = resolve(ModelOptions(), EngineOptions(), CPU_ONLY)
    assert (decided.device, decided.is_cpu, decided.dtype, decided.kv_dtype) == ("cpu", True, "float32", "float16")
    assert (decided.chunk_tokens, decided.step_tokens, decided.max_rows, decided.num_threads) == (256, 256, 8, 6)
    assert (decided.usable_bytes, decided.reserve_bytes) == (36 * 2**30, CPU_RESERVE_BYTES)
    assert decided.decisions == (
        "device cpu: no GPU is present",
        "activations in float32: the default on a CPU",
        "KV cache in float16: half the memory and reading time of float32",
    )


def test_resolve_with_gpus_takes_the_first_and_its_free_memory() -> None:
    decided = resolve(ModelOptions(), EngineOptions(), WITH_GPUS)
    assert (decided.device, decided.is_cpu, decided.dtype, decided.kv_dtype) == (
        "cuda:0",
        False,
        "bfloat16",
        "bfloat16",
    )
    assert (decided.chunk_tokens, decided.step_tokens, decided.max_rows) == (2048, 8192, 256)
    assert (decided.usable_bytes, decided.reserve_bytes) == (63 * 2**30, GPU_RESERVE_BYTES)
    assert decided.decisions == (
        "device cuda:0 (card 0): a GPU is present",
        "activations in bfloat16: the default on a GPU",
    )


@pytest.mark.parametrize(
    ("wanted", "device", "usable_bytes"),
    [("cpu", "cpu", 36 * 2**30), ("cuda", "cuda:0", 63 * 2**30), ("cuda:1", "cuda:1", 36 * 2**30)],
)
def test_resolve_takes_the_device_that_was_asked_for(wanted: str, device: str, usable_bytes: int) -> None:
    decided = resolve(ModelOptions(device=wanted, dtype="float16"), EngineOptions(), WITH_GPUS)
    assert (decided.device, decided.usable_bytes) == (device, usable_bytes)
    assert decided.decisions == (), "what was asked for needs no reason"


def test_resolve_takes_every_option_as_it_is_given() -> None:
    engine = EngineOptions(chunk_tokens=7, step_tokens=9, max_rows=3, threads=2)
    decided = resolve(ModelOptions(dtype="bfloat16", kv_dtype="float16"), engine, CPU_ONLY)
    assert (decided.dtype, decided.kv_dtype) == ("bfloat16", "float16")
    assert (decided.chunk_tokens, decided.step_tokens, decided.max_rows, decided.num_threads) == (7, 9, 3, 2)


def test_resolve_refuses_a_context_below_a_block_and_says_what_a_block_is() -> None:
    with pytest.raises(OptionError, match="context_tokens must be at least 16, a block of the KV cache, not 15"):
        resolve(ModelOptions(context_tokens=15), EngineOptions(), CPU_ONLY)


def test_resolve_widens_the_step_to_a_chunk_that_was_asked_for() -> None:
    assert resolve(ModelOptions(), EngineOptions(chunk_tokens=1000), CPU_ONLY).step_tokens == 1000


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("name", ["chunk_tokens", "step_tokens", "max_rows", "threads"])
def test_resolve_refuses_counts_below_one(name: str, value: int) -> None:
    """0 passed for "not given", and the default was taken without a word."""
    options: dict[str, Any] = {name: value}
    with pytest.raises(OptionError, match=f"{name} must be at least 1, not {value}; leave it out for"):
        resolve(ModelOptions(), EngineOptions(**options), CPU_ONLY)


def test_resolve_refuses_more_threads_than_a_process_can_have() -> None:
    """Starting them failed in the middle of loading, with an error that named nothing."""
    assert resolve(ModelOptions(), EngineOptions(threads=1024), CPU_ONLY).num_threads == 1024
    with pytest.raises(OptionError, match="threads must be at most 1024, not 100000; leave it out for"):
        resolve(ModelOptions(), EngineOptions(threads=100_000), CPU_ONLY)


def test_resolve_refuses_a_step_narrower_than_a_chunk() -> None:
    with pytest.raises(OptionError, match="step_tokens 8 is below chunk_tokens 16"):
        resolve(ModelOptions(), EngineOptions(chunk_tokens=16, step_tokens=8), CPU_ONLY)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "mps", "", "cuda:0:1"])
def test_resolve_refuses_a_device_it_does_not_know(device: str) -> None:
    with pytest.raises(OptionError, match=f"device must be cpu, cuda or cuda:N, not {device!r}"):
        resolve(ModelOptions(device=device), EngineOptions(), WITH_GPUS)


def test_resolve_refuses_a_gpu_that_is_not_here_by_number() -> None:
    with pytest.raises(OptionError, match="'cuda:2' is not here: this machine shows 2 CUDA devices"):
        resolve(ModelOptions(device="cuda:2"), EngineOptions(), WITH_GPUS)
    with pytest.raises(OptionError, match="'cuda' is not here: this machine shows 0 CUDA devices"):
        resolve(ModelOptions(device="cuda"), EngineOptions(), CPU_ONLY)


def test_resolve_takes_an_int8_cache_on_every_device() -> None:
    for facts in (CPU_ONLY, WITH_GPUS):
        assert resolve(ModelOptions(kv_dtype="int8"), EngineOptions(), facts).kv_dtype == "int8"


def test_resolve_takes_an_fp8_cache_where_the_gpu_knows_it() -> None:
    fp8 = ModelOptions(kv_dtype="fp8")
    assert resolve(fp8, EngineOptions(), WITH_GPUS).kv_dtype == "fp8"
    with pytest.raises(OptionError, match=r"kv_dtype fp8 is for GPUs of compute capability 8\.9 and more; int8 takes"):
        resolve(fp8, EngineOptions(), CPU_ONLY)
    with pytest.raises(OptionError, match=r"fp8 needs a GPU .* 8\.9 and more, cuda:1 \(card 1\) has 8\.0; int8"):
        resolve(replace(fp8, device="cuda:1"), EngineOptions(), WITH_GPUS)


def test_resolve_takes_rounded_inputs_on_a_cpu_in_float32() -> None:
    decided = resolve(ModelOptions(inputs="int8", device="cpu"), EngineOptions(), CPU_ONLY)
    assert decided.inputs == "int8"
    assert any("inputs of quantised layers in int8" in reason for reason in decided.decisions)
    with pytest.raises(OptionError, match="inputs int8 computes in float32, not bfloat16"):
        resolve(ModelOptions(inputs="int8", device="cpu", dtype="bfloat16"), EngineOptions(), CPU_ONLY)
    with pytest.raises(OptionError, match="inputs int8 is for CPUs, not cuda:0"):
        resolve(ModelOptions(inputs="int8", device="cuda:0"), EngineOptions(), WITH_GPUS)


def test_resolve_takes_fp8_weights_where_the_gpu_computes_in_bfloat16() -> None:
    fp8 = ModelOptions(weights="fp8")
    decided = resolve(fp8, EngineOptions(), WITH_GPUS)
    assert decided.weights == "fp8"
    assert any("weights of layers in fp8" in reason for reason in decided.decisions)
    assert resolve(ModelOptions(), EngineOptions(), WITH_GPUS).weights is None
    with pytest.raises(OptionError, match="weights fp8 is for GPUs"):
        resolve(fp8, EngineOptions(), CPU_ONLY)
    with pytest.raises(OptionError, match="weights fp8 needs a GPU"):
        resolve(replace(fp8, device="cuda:1"), EngineOptions(), WITH_GPUS)
    with pytest.raises(OptionError, match="weights fp8 computes in bfloat16, not float16"):
        resolve(replace(fp8, dtype="float16"), EngineOptions(), WITH_GPUS)


@pytest.mark.parametrize(
    "model", [ModelOptions(weights="fp8"), ModelOptions(kv_dtype="fp8"), ModelOptions(kv_dtype="int8")]
)
def test_resolve_refuses_to_be_deterministic_with_numbers_of_8_bits(model: ModelOptions) -> None:
    with pytest.raises(OptionError, match="is not deterministic"):
        resolve(model, EngineOptions(deterministic=True), WITH_GPUS)


def test_resolve_refuses_to_be_deterministic_on_a_cpu() -> None:
    with pytest.raises(OptionError, match="deterministic is for GPUs"):
        resolve(ModelOptions(), EngineOptions(deterministic=True), CPU_ONLY)
    assert resolve(ModelOptions(), EngineOptions(deterministic=True), WITH_GPUS).device == "cuda:0"


@pytest.mark.parametrize("name", ["kv_memory_bytes", "memory_soft_bytes", "memory_hard_bytes", "disk_cache_bytes"])
@pytest.mark.parametrize("value", [-1, 1.5, "2GiB", True])
def test_options_take_no_bytes_that_are_none(name: str, value: Any) -> None:
    """A size as text ended in a TypeError after loading, one below zero emptied the disk cache without a word."""
    with pytest.raises(OptionError, match=f"{name} must be a number of bytes, 0 or more"):
        EngineOptions(**{name: value})
    assert getattr(EngineOptions(**{name: 0}), name) == 0
