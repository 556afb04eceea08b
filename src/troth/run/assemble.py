"""From a plan to a running engine: loads the weights, makes the caches and puts the parts of ring 2 together.

Refuses to decide anything: ``planned.py`` did, and only what a GPU really needs is measured here first. The text side
comes in ready, from ``compose.py``. Read next: ``engine.py``, ``runner.py``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from troth.cache.block_memory import BlockMemory, held_bytes
from troth.cache.checkpoints import CheckpointStorage
from troth.cache.disk_tier import DiskTier
from troth.cache.host_copies import HostCopies
from troth.cache.storage import CacheStorage
from troth.config.options import NO_DISK_CACHE, EngineOptions
from troth.contracts.cache_spec import CacheSpec, attention_groups, recurrent_bytes
from troth.contracts.ports import EngineInfo
from troth.contracts.progress import LoadProgress, stages_text
from troth.contracts.speculation import Speculation, read_speculation
from troth.draft.made import NOTHING_MADE, MadeTerms
from troth.errors import OptionError, RequestError
from troth.models.family import Model, Placement
from troth.models.registry import Recognised
from troth.ops import registry
from troth.ops.layer_kv import dtype_of
from troth.ops.registry import ProviderStatus
from troth.run.decode_steps import launches_by_shapes, pipeline_depth, started_decode, step_builders
from troth.run.disk_cache import DiskCache
from troth.run.drafting import Drafting
from troth.run.engine import EngineLoop
from troth.run.first_kernels import FirstLaunches, compile_first
from troth.run.grammar import RowGrammars
from troth.run.graphs import MOST_DRAFTS
from troth.run.load_times import LoadTimes
from troth.run.memory_guard import MemoryGuard, memory_marks
from troth.run.planned import Planned, label_of, max_samples, namespace_of, require_fit
from troth.run.rehearsal import rehearsal
from troth.run.runner import ModelRunner
from troth.run.step_cost import StepCost, StepTrial
from troth.run.warmup import warm_up
from troth.run.worker import EngineThread
from troth.schedule.admission import SchedulerLimits
from troth.schedule.scheduler import Scheduler
from troth.schedule.sizing import checkpoint_interval
from troth.text.detokenize import TokenBytes
from troth.text.grammar import GrammarCompiler
from troth.weights.upload import release

_log = logging.getLogger("troth")


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
        OptionError: an op provider asked for cannot run here, or a draft source that is named cannot draft.
    """
    require_fit(planned)
    default = _default_speculation(planned)
    started = time.monotonic()
    progress = times = LoadTimes(progress, time.monotonic)
    providers = activate(planned)
    read_held = held_bytes(_device(planned))
    marks = memory_marks(
        planned.plan, read_held() or 0, planned.engine.memory_soft_bytes, planned.engine.memory_hard_bytes
    )
    grammars = RowGrammars(compiler)
    loaded = load_runner(planned, grammars, progress)
    planned, runner = loaded.planned, loaded.runner
    if not planned.resolved.is_cpu:
        progress("warming up", 1, 2)
        warm_up(runner, scheduler_limits(planned), tokenizer, pipeline_depth(_device(planned)))
    progress("warming up", 2, 2)
    scheduler = Scheduler(scheduler_limits(planned))
    active = [provider.name for provider in providers if provider.active]
    disk = _disk_cache(planned, active, scheduler, HostCopies(loaded.cache, loaded.checkpoints, runner.finish_started))
    if disk is not None:
        disk.note_prefill(loaded.cost.num_tokens, loaded.cost.seconds)
    blocks = BlockMemory(loaded.cache, _device(planned), runner.finish_started)
    memory = MemoryGuard(scheduler, marks, read_held, blocks.give_back, frees_blocks=blocks.frees_blocks)
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
        drafting=_drafting(planned, scheduler, grammars, runner, default),
    )

    def downgrades() -> tuple[str, ...]:
        return registry.fallbacks() + runner.downgrades + (() if disk is None else disk.downgrades) + memory.downgrades

    stages_s = times.finish()
    info = _info(planned, scheduler, load_s=time.monotonic() - started, load_stages_s=stages_s)
    _log.info("loaded %s in %.1f s: %s", info.model, info.load_s, stages_text(stages_s))
    return EngineThread(loop, info, clock=time.monotonic, downgrades=downgrades, idle_work=_rehearsal(planned, loaded))


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its caches, ready to compute steps."""

    planned: Planned
    """As it was measured."""
    cost: StepCost
    model: Model
    draft_model: Model | None
    cache: CacheStorage
    checkpoints: CheckpointStorage | None
    runner: ModelRunner


def activate(planned: Planned) -> tuple[ProviderStatus, ...]:
    """Fix threads and op providers of this process, before anything is loaded. Raises OptionError."""
    if planned.resolved.is_cpu:
        torch.set_num_threads(planned.resolved.num_threads)
    providers = registry.activate(provider_order(planned.engine, planned.specs))
    (triton,) = (provider for provider in providers if provider.name == "triton")
    if planned.resolved.weights is not None and not triton.active:
        raise OptionError(f"weights {planned.resolved.weights} needs the op provider triton: {triton.reason}")
    return providers


def load_runner(planned: Planned, grammars: RowGrammars | None, progress: LoadProgress) -> Loaded:
    """Read the weights and make the caches of a plan that fits. Raises ModelLoadError, OutOfMemory."""
    model = _load(planned, planned.recognised, progress)
    draft_model = None if planned.draft_model is None else _load(planned, planned.draft_model, progress)
    planned, cost = _measured(planned, model, draft_model, progress)
    cache = _cache(planned)
    num_checkpoints = planned.plan.num_checkpoints
    checkpoints = CheckpointStorage(cache, num_checkpoints) if num_checkpoints else None
    runner = _runner(planned, model, cache, checkpoints, grammars, draft_model)
    return Loaded(planned, cost, model, draft_model, cache, checkpoints, runner)


def provider_order(engine: EngineOptions, specs: tuple[CacheSpec, ...]) -> tuple[str, ...] | None:
    """Names of op providers, first choice first; None: the default order.

    Raises:
        OptionError: a model with these caches cannot be deterministic.
    """
    if not engine.deterministic:
        return engine.providers
    if recurrent_bytes(specs) is not None:
        raise OptionError(
            "deterministic is not available for models with recurrent layers: their sums depend on how prompts are cut "
            "into chunks; leave it out"
        )
    return ("invariant", *(engine.providers or registry.default_order()))


def _device(planned: Planned) -> torch.device:
    return torch.device(planned.resolved.device)


def _dtype(planned: Planned) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, planned.resolved.dtype)
    return dtype


def _kv_dtype(planned: Planned) -> torch.dtype:
    return dtype_of(planned.resolved.kv_dtype)


def _load(planned: Planned, recognised: Recognised, progress: LoadProgress) -> Model:
    place = Placement(
        device=_device(planned),
        dtype=_dtype(planned),
        context_tokens=planned.plan.context_tokens,
        weights=planned.resolved.weights if recognised is planned.recognised else None,
        inputs=planned.resolved.inputs if recognised is planned.recognised else None,
    )
    model = recognised.load(place, lambda done, total: progress("reading weights", done, total))
    if not planned.resolved.is_cpu:
        release()
    return model


def _measured(
    planned: Planned, model: Model, draft_model: Model | None, progress: LoadProgress
) -> tuple[Planned, StepCost]:
    """The plan once more, with what a step really takes of the device. Raises ModelLoadError when it does not fit."""
    device, resolved = _device(planned), planned.resolved
    weights_bytes = planned.plan.weights_bytes if resolved.is_cpu else torch.cuda.memory_allocated(device)
    tokens = min(resolved.step_tokens, planned.plan.context_tokens)

    def measured(one: Model, specs: tuple[CacheSpec, ...]) -> StepCost:
        samples, kv_dtype = max_samples(resolved), _kv_dtype(planned)
        if not resolved.is_cpu and launches_by_shapes():
            launches = FirstLaunches(
                one,
                specs,
                max_rows=planned.plan.max_rows,
                context_tokens=planned.plan.context_tokens,
                step_tokens=tokens,
                dtype=_dtype(planned),
                kv_dtype=kv_dtype,
                device=device,
            )
            progress("compiling kernels", 0, 1)
            compile_first(launches, progress)
        progress("measuring a step", 0, 1)
        return StepTrial(one, specs, max_samples=samples, kv_dtype=kv_dtype, device=device).measure(tokens)

    cost = measured(model, planned.specs)
    if draft_model is not None:
        cost = cost.then(measured(draft_model, planned.draft_specs))
    if not resolved.is_cpu:
        torch.cuda.empty_cache()
    if cost.transient_bytes is not None:
        planned = planned.measured(weights_bytes=weights_bytes, transient_bytes=cost.transient_bytes)
        require_fit(planned)
    return planned, cost


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
    grammars: RowGrammars | None,
    draft_model: Model | None,
) -> ModelRunner:
    batches, decodes = step_builders(
        model,
        cache,
        attention_groups(planned.specs),
        max_rows=planned.plan.max_rows,
        context_tokens=planned.plan.context_tokens,
        device=_device(planned),
    )
    started = started_decode(batches, decodes, _device(planned))
    return ModelRunner(model, cache, batches, decodes, checkpoints, grammars, draft_model, started)


def scheduler_limits(planned: Planned) -> SchedulerLimits:
    """What the scheduler of a planned engine works with."""
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


def _rehearsal(planned: Planned, loaded: Loaded) -> Iterable[None] | None:
    """Has kernels compiled that some request would wait for otherwise, bit by bit: all at load would take a
    machine's first start beyond its 20 s.
    """
    if planned.resolved.is_cpu or not launches_by_shapes():
        return None
    return rehearsal(
        loaded.model,
        loaded.cache,
        attention_groups(planned.specs),
        max_rows=planned.plan.max_rows,
        context_tokens=planned.plan.context_tokens,
        step_tokens=planned.resolved.step_tokens,
        dtype=_dtype(planned),
        device=_device(planned),
    )


def _default_speculation(planned: Planned) -> Speculation:
    """Who drafts for requests that do not say. Raises OptionError for a source that cannot serve."""
    try:
        default = read_speculation(planned.engine.speculation)
    except RequestError as error:
        raise OptionError(str(error)) from error
    refusal = None if planned.draft_model is not None else NOTHING_MADE["draft"].refusal
    if refusal is not None and "draft" in default.sources:
        raise OptionError(f"speculation draft: {refusal}")
    return default


def _drafting(
    planned: Planned, scheduler: Scheduler, grammars: RowGrammars, runner: ModelRunner, default: Speculation
) -> Drafting:
    """Makes drafts, by default those that the options name."""
    made = dict(NOTHING_MADE)
    if planned.draft_model is not None:
        made["draft"] = MadeTerms(refusal=None, failure=lambda: runner.made_drafts_failure)
    made["mtp"] = MadeTerms(
        refusal=planned.head.refusal, uncertified=planned.head.uncertified, failure=lambda: runner.made_drafts_failure
    )
    return Drafting(
        scheduler,
        time.monotonic,
        default=default,
        forced_ids=grammars.forced_ids,
        made=made,
        # A step with more of a row is not captured: what it costs, more drafts hardly earn.
        most=None if planned.resolved.is_cpu else MOST_DRAFTS,
    )


def _disk_cache(planned: Planned, providers: list[str], scheduler: Scheduler, copies: HostCopies) -> DiskCache | None:
    """The prompt cache's disk tier, where one is asked for and there is a prompt cache.

    Args:
        providers: names of the active ones; numbers that others computed are not taken for theirs.
    """
    folder = planned.engine.disk_cache
    if folder is None or folder == NO_DISK_CACHE or scheduler.prefix_index is None:
        return None
    namespace = namespace_of(planned, planned.recognised.artifact.fingerprint(), providers)
    tier = DiskTier(
        Path(folder).expanduser(),
        namespace,
        quota_bytes=planned.engine.disk_cache_bytes,
        label=label_of(planned),
    )
    return DiskCache(scheduler, tier, copies, time.monotonic)


def _info(planned: Planned, scheduler: Scheduler, *, load_s: float, load_stages_s: dict[str, float]) -> EngineInfo:
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
        weights=resolved.weights,
        inputs=resolved.inputs,
        pipeline_depth=pipeline_depth(_device(planned)),
        plan=memory,
        load_s=load_s,
        load_stages_s=load_stages_s,
    )
