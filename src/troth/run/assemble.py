"""From a plan to a running engine: loads the weights, makes the caches and puts the parts of ring 2 together.

Refuses to decide anything: ``planned.py`` did, and only what a GPU really needs is measured here first. The text side
comes in ready, from ``compose.py``. Read next: ``engine.py``, ``runner.py``.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from troth.cache.block_memory import BlockMemory, held_bytes
from troth.cache.checkpoints import CheckpointStorage
from troth.cache.disk_tier import DiskTier
from troth.cache.host_copies import HostCopies
from troth.cache.storage import CacheStorage
from troth.config.options import NO_DISK_CACHE
from troth.contracts.cache_spec import attention_groups, recurrent_bytes
from troth.contracts.ports import EngineInfo
from troth.contracts.progress import LoadProgress
from troth.contracts.speculation import read_speculation
from troth.errors import OptionError, RequestError
from troth.models.family import Model, Placement
from troth.ops import registry
from troth.run.decode_steps import pipeline_depth, step_builders
from troth.run.disk_cache import DiskCache
from troth.run.drafting import RECURRENT, Drafting
from troth.run.engine import EngineLoop
from troth.run.grammar import RowGrammars
from troth.run.memory_guard import MemoryGuard, memory_marks
from troth.run.planned import Planned, max_samples, namespace_of, require_fit
from troth.run.runner import ModelRunner
from troth.run.warmup import measure_transient_bytes, warm_up
from troth.run.worker import EngineThread
from troth.schedule.admission import SchedulerLimits
from troth.schedule.scheduler import Scheduler
from troth.schedule.sizing import checkpoint_interval
from troth.text.detokenize import TokenBytes
from troth.text.grammar import GrammarCompiler
from troth.weights.upload import release


def assemble(
    planned: Planned, tokenizer: TokenBytes, compiler: GrammarCompiler, progress: LoadProgress
) -> EngineThread:
    """Load a model and start the engine's thread.

    Args:
        planned: what to load, and into what room.
        tokenizer: turns its ids into text.
        compiler: compiles grammars for its vocabulary.
        progress: told how far loading is.

    Raises:
        ModelLoadError: the plan does not fit, or the weights are not what the config says.
        OutOfMemory: the device had less room than it said.
        OptionError: an op provider asked for cannot run here.
    """
    require_fit(planned)
    started = time.monotonic()
    if planned.resolved.is_cpu:
        torch.set_num_threads(planned.resolved.num_threads)
    providers = registry.activate(planned.engine.providers)
    read_held = held_bytes(_device(planned))
    marks = memory_marks(
        planned.plan, read_held() or 0, planned.engine.memory_soft_bytes, planned.engine.memory_hard_bytes
    )
    model = _load(planned, progress)
    if not planned.resolved.is_cpu:
        planned = _measured(planned, model, progress)
    cache = _cache(planned)
    num_checkpoints = planned.plan.num_checkpoints
    checkpoints = CheckpointStorage(cache, num_checkpoints) if num_checkpoints else None
    grammars = RowGrammars(compiler)
    runner = _runner(planned, model, cache, checkpoints, grammars)
    if not planned.resolved.is_cpu:
        progress("warming up", 1, 2)
        warm_up(runner, _limits(planned), tokenizer, pipeline_depth(_device(planned)))
        progress("warming up", 2, 2)
    scheduler = Scheduler(_limits(planned))
    active = [provider.name for provider in providers if provider.active]
    disk = _disk_cache(planned, active, scheduler, HostCopies(cache, checkpoints))
    memory = MemoryGuard(scheduler, marks, read_held, BlockMemory(cache, _device(planned)).give_back)
    loop = EngineLoop(
        scheduler,
        runner,
        tokenizer,
        clock=time.monotonic,
        pipeline_depth=pipeline_depth(_device(planned)),
        consumer_idle_s=planned.engine.consumer_idle_s,
        grammars=grammars,
        disk=disk,
        memory=memory,
        drafting=_drafting(planned, scheduler, grammars),
    )

    def downgrades() -> tuple[str, ...]:
        return registry.fallbacks() + runner.downgrades + (() if disk is None else disk.downgrades) + memory.downgrades

    info = _info(planned, scheduler, load_s=time.monotonic() - started)
    return EngineThread(loop, info, clock=time.monotonic, downgrades=downgrades)


def _device(planned: Planned) -> torch.device:
    return torch.device(planned.resolved.device)


def _kv_dtype(planned: Planned) -> torch.dtype:
    kv_dtype: torch.dtype = getattr(torch, planned.resolved.kv_dtype)
    return kv_dtype


def _load(planned: Planned, progress: LoadProgress) -> Model:
    dtype: torch.dtype = getattr(torch, planned.resolved.dtype)
    place = Placement(device=_device(planned), dtype=dtype, context_tokens=planned.plan.context_tokens)
    model = planned.recognised.load(place, lambda done, total: progress("reading weights", done, total))
    if not planned.resolved.is_cpu:
        release()
    return model


def _measured(planned: Planned, model: Model, progress: LoadProgress) -> Planned:
    """The plan once more, with what a step really takes of the device. Raises ModelLoadError when it does not fit."""
    progress("warming up", 0, 2)
    device, resolved = _device(planned), planned.resolved
    weights_bytes = torch.cuda.memory_allocated(device)
    transient_bytes = measure_transient_bytes(
        model,
        planned.specs,
        step_tokens=min(resolved.step_tokens, planned.plan.context_tokens),
        max_rows=resolved.max_rows,
        kv_dtype=_kv_dtype(planned),
        device=device,
    )
    torch.cuda.empty_cache()
    measured = planned.measured(weights_bytes=weights_bytes, transient_bytes=transient_bytes)
    require_fit(measured)
    return measured


def _num_blocks(planned: Planned) -> tuple[int, ...]:
    return tuple(group.num_blocks for group in planned.plan.groups)


def _cache(planned: Planned) -> CacheStorage:
    return CacheStorage(
        planned.specs,
        _num_blocks(planned),
        planned.plan.max_rows,
        dtype=_kv_dtype(planned),
        device=_device(planned),
    )


def _runner(
    planned: Planned,
    model: Model,
    cache: CacheStorage,
    checkpoints: CheckpointStorage | None,
    grammars: RowGrammars,
) -> ModelRunner:
    batches, decodes = step_builders(
        model,
        cache,
        attention_groups(planned.specs),
        max_rows=planned.plan.max_rows,
        context_tokens=planned.plan.context_tokens,
        device=_device(planned),
    )
    return ModelRunner(model, cache, batches, decodes, checkpoints, grammars)


def _limits(planned: Planned) -> SchedulerLimits:
    memory, resolved = planned.plan, planned.resolved
    return SchedulerLimits(
        groups=attention_groups(planned.specs),
        num_blocks=_num_blocks(planned),
        max_rows=memory.max_rows,
        max_waiting=planned.engine.max_waiting,
        chunk_tokens=resolved.chunk_tokens,
        step_tokens=resolved.step_tokens,
        context_tokens=memory.context_tokens,
        prompt_cache=True,
        num_checkpoints=memory.num_checkpoints,
        checkpoint_bytes=memory.bytes_per_checkpoint,
        checkpoint_interval_tokens=checkpoint_interval(planned.specs, resolved.chunk_tokens),
        max_samples=max_samples(resolved),
    )


def _drafting(planned: Planned, scheduler: Scheduler, grammars: RowGrammars) -> Drafting:
    """Makes drafts, by default those that the options name. Raises OptionError for a source that cannot serve."""
    refusal = RECURRENT if recurrent_bytes(planned.specs) is not None else None
    sources = planned.engine.speculation
    if sources and refusal is not None:
        raise OptionError(f"speculation {','.join(sources)} is not available: {refusal}; leave it out")
    try:
        default = read_speculation(sources)
    except RequestError as error:
        raise OptionError(str(error)) from error
    return Drafting(scheduler, time.monotonic, default=default, forced_ids=grammars.forced_ids, refusal=refusal)


def _disk_cache(planned: Planned, providers: list[str], scheduler: Scheduler, copies: HostCopies) -> DiskCache | None:
    """The prompt cache's disk tier, where one is asked for and there is a prompt cache.

    Args:
        providers: names of the active ones; numbers that others computed are not taken for theirs.
    """
    folder, resolved = planned.engine.disk_cache, planned.resolved
    if folder is None or folder == NO_DISK_CACHE or scheduler.prefix_index is None:
        return None
    namespace = namespace_of(planned, planned.recognised.artifact.fingerprint(), providers)
    tier = DiskTier(
        Path(folder).expanduser(),
        namespace,
        quota_bytes=planned.engine.disk_cache_bytes,
        label=f"{planned.name}, {resolved.kv_dtype}",
    )
    return DiskCache(scheduler, tier, copies, time.monotonic)


def _info(planned: Planned, scheduler: Scheduler, *, load_s: float) -> EngineInfo:
    memory, resolved = planned.plan, planned.resolved
    return EngineInfo(
        model=planned.name,
        family=planned.recognised.family,
        context_tokens=scheduler.limits.largest_request,
        max_rows=memory.max_rows,
        vocab_size=planned.recognised.config.vocab_size,
        max_waiting=planned.engine.max_waiting,
        device=resolved.device,
        dtype=resolved.dtype,
        kv_dtype=resolved.kv_dtype,
        pipeline_depth=pipeline_depth(_device(planned)),
        plan=memory,
        load_s=load_s,
    )
