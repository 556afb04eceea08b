"""Wires the rings: artifact -> text side (no torch) and artifact -> engine (torch, imported inside the functions).

Nothing else in the package imports both ring 2 and ring 3.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from troth.artifact.artifact import Artifact
from troth.artifact.resolve import resolve as resolve_artifact
from troth.artifact.template_source import TOOL_TEMPLATE
from troth.config.options import NO_DISK_CACHE, EngineOptions, ModelOptions
from troth.contracts.memory_plan import MemoryPlan
from troth.contracts.progress import LoadProgress, no_progress
from troth.errors import ModelLoadError, OptionError

if TYPE_CHECKING:
    import torch

    from troth.cache.checkpoints import CheckpointStorage
    from troth.cache.disk_folder import DiskFolder
    from troth.cache.storage import CacheStorage
    from troth.config.facts import MachineFacts
    from troth.config.resolve import Resolved
    from troth.contracts.cache_spec import CacheSpec
    from troth.contracts.capabilities import TemplateCapabilities
    from troth.contracts.tools import CallForm
    from troth.models.family import FamilyConfig, Model
    from troth.models.registry import Recognised
    from troth.ops.registry import ProviderStatus
    from troth.run.disk_cache import DiskCache
    from troth.run.worker import EngineThread
    from troth.schedule.scheduler import Scheduler
    from troth.text.call_pattern import CallPattern
    from troth.text.chat_renderer import ChatRenderer
    from troth.text.defaults import GenerationDefaults
    from troth.text.grammar import GrammarCompiler
    from troth.text.prompt import PromptBuilder
    from troth.text.template_probe import Probe
    from troth.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextSide:
    """What turns messages into token ids and back; lives in the server's process and in the engine's."""

    artifact: Artifact
    tokenizer: Tokenizer
    template: ChatRenderer | None
    defaults: GenerationDefaults
    steady_headers: bool = True
    """Whether prompts are built without what clients change with each request."""
    compilers: dict[int, GrammarCompiler] = field(default_factory=dict, compare=False)
    """Made when asked for, by size of the vocabulary."""
    probes: list[Probe] = field(default_factory=list, compare=False)
    """What the template was proved to do, once it was asked."""

    @property
    def probe(self) -> Probe | None:
        """What the template was proved to do; None without one. The first call renders it some 70 times (50 ms)."""
        from troth.text.probe_formats import RegistryReader
        from troth.text.template_probe import probe_template

        if self.template is not None and not self.probes:
            self.probes.append(probe_template(self.template, RegistryReader(), self.declared_calls))
        return self.probes[0] if self.probes else None

    @property
    def declared_calls(self) -> CallForm | None:
        """How the model's tokenizer config declares the calls in its answers; None where it does not, or otherwise."""
        from troth.artifact.json_file import read_json_object
        from troth.text.tool_formats.derived import declared_form

        path = self.artifact.tokenizer_files.get("tokenizer_config.json")
        declared = read_json_object(path).get("response_template") if path is not None else None
        return declared_form(declared) if isinstance(declared, dict) else None

    @property
    def capabilities(self) -> TemplateCapabilities:
        """What ``probe`` proved; without a template nothing."""
        from troth.contracts.capabilities import TemplateCapabilities

        return self.probe.capabilities if self.probe is not None else TemplateCapabilities()

    @property
    def calls(self) -> CallPattern | None:
        """How the model writes calls, where a grammar can be made of it."""
        from troth.text.call_pattern import call_pattern

        found = self.capabilities
        return call_pattern(self.probe.replies, found.tool_format, found.call_form) if self.probe is not None else None

    def grammars(self, vocab_size: int) -> GrammarCompiler:
        """Compiles grammars for a model with so many logits; the same one for the same size."""
        from troth.text.grammar import GrammarCompiler

        return self.compilers.setdefault(vocab_size, GrammarCompiler(self.tokenizer, vocab_size))

    def prompts(self, context_tokens: int) -> PromptBuilder:
        """Builds prompts for an engine with this context."""
        from troth.text.prompt import PromptBuilder

        probe = self.probe
        template = self.template.with_form(probe.form) if self.template is not None and probe is not None else None
        return PromptBuilder(
            self.tokenizer, template, context_tokens=context_tokens, steady_headers=self.steady_headers
        )


@dataclass(frozen=True, slots=True)
class Planned:
    """A model about to be loaded: everything is decided, nothing is read yet."""

    recognised: Recognised
    resolved: Resolved
    plan: MemoryPlan
    model: ModelOptions
    engine: EngineOptions

    @property
    def name(self) -> str:
        """The name the model is served under."""
        return self.model.name or self.recognised.artifact.name


def find(options: ModelOptions) -> Artifact:
    """The artifact an option names; the demo model when it names none. Raises ModelLoadError."""
    if options.model == "":
        raise ModelLoadError("the path is empty; leave the model out for the demo model", field="model")
    return resolve_artifact(Path(options.model) if options.model is not None else None)


def load_text(artifact: Artifact, options: ModelOptions) -> TextSide:
    """Tokenizer, chat template and generation defaults of an artifact. Raises ModelLoadError."""
    from troth.text.chat_renderer import ChatRenderer
    from troth.text.chat_template import ChatTemplate
    from troth.text.defaults import GenerationDefaults
    from troth.text.tokenizer import Tokenizer

    source = artifact.chat_template.source if artifact.chat_template else None
    tool_source = artifact.chat_template.named.get(TOOL_TEMPLATE) if artifact.chat_template else None
    if options.chat_template is not None:
        try:
            source, tool_source = Path(options.chat_template).read_text(encoding="utf-8"), None
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"chat template {options.chat_template!r} cannot be read: {error}") from error
    if artifact.gguf is not None:
        tokenizer = Tokenizer.from_gguf(artifact.gguf.metadata, str(artifact.gguf.path), template=source)
    else:
        tokenizer = Tokenizer.from_folder(artifact.root, template=source)

    def compiled(text: str | None) -> ChatTemplate | None:
        return ChatTemplate(text, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token) if text else None

    template = compiled(source)
    renderer = ChatRenderer(template, tool_template=compiled(tool_source)) if template is not None else None
    defaults = GenerationDefaults.from_config(artifact.generation_config)
    return TextSide(artifact, tokenizer, renderer, defaults, options.steady_headers)


def machine_facts() -> MachineFacts:
    """Cores, memory and CUDA devices of this machine."""
    import torch

    from troth.config.facts import GpuFacts, read_facts

    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        gpus.append(GpuFacts(index=index, name=name, total_bytes=total, free_bytes=free))
    return read_facts(tuple(gpus))


def plan(artifact: Artifact, model: ModelOptions, engine: EngineOptions) -> Planned:
    """Decide device, numbers, pools and context from headers alone.

    Raises:
        ModelLoadError: the architecture or its config is not supported.
        OptionError: an option cannot be honoured.
    """
    from troth.config.resolve import ELEMENT_BYTES, resolve
    from troth.models.registry import recognise

    recognised = recognise(artifact)
    resolved = resolve(model, engine, machine_facts())
    config = recognised.config
    element = ELEMENT_BYTES[resolved.dtype]
    activations = resolved.step_tokens * (6 * config.hidden_size + 3 * config.intermediate_size) * element
    logits = 3 * max(resolved.max_rows, 64) * config.vocab_size * 4
    weights_bytes = _weights_bytes(artifact, resolved.device, resolved.dtype, engine)
    memory = _memory_plan(config, resolved, model, engine, weights_bytes, activations + logits)
    return Planned(recognised, resolved, memory, model, engine)


def _memory_plan(
    config: FamilyConfig,
    resolved: Resolved,
    model: ModelOptions,
    engine: EngineOptions,
    weights_bytes: int,
    transient_bytes: int,
) -> MemoryPlan:
    from troth.schedule.sizing import CACHE_SHARE, GPU_CACHE_SHARE, Demand, plan_memory

    memory = plan_memory(
        Demand(
            device=resolved.device,
            dtype=resolved.dtype,
            specs=_cache_specs(config, resolved.kv_dtype),
            weights_bytes=weights_bytes,
            transient_bytes=transient_bytes,
            reserve_bytes=resolved.reserve_bytes,
            usable_bytes=resolved.usable_bytes,
            declared_context_tokens=config.max_position_embeddings,
            wanted_context_tokens=model.context_tokens,
            max_rows=resolved.max_rows,
            step_tokens=resolved.step_tokens,
            kv_memory_bytes=engine.kv_memory_bytes,
            cache_share=CACHE_SHARE if resolved.is_cpu else GPU_CACHE_SHARE,
        )
    )
    return replace(memory, decisions=resolved.decisions + memory.decisions)


def start_engine(
    planned: Planned, text: TextSide, options: EngineOptions, progress: LoadProgress = no_progress
) -> EngineThread:
    """Load the weights, build the caches and start the engine's thread.

    Raises:
        ModelLoadError: the plan does not fit, or the weights are not what the config says.
        OutOfMemory: the device had less room than it said.
        OptionError: an op provider asked for cannot run here.
    """
    import torch

    from troth.cache.checkpoints import CheckpointStorage
    from troth.cache.storage import CacheStorage
    from troth.contracts.cache_spec import attention_groups
    from troth.contracts.ports import EngineInfo
    from troth.models.family import Placement
    from troth.ops import registry
    from troth.run.decode_steps import pipeline_depth, step_builders
    from troth.run.engine import EngineLoop
    from troth.run.grammar import RowGrammars
    from troth.run.runner import ModelRunner
    from troth.run.worker import EngineThread
    from troth.schedule.admission import SchedulerLimits
    from troth.schedule.scheduler import Scheduler
    from troth.schedule.sizing import checkpoint_interval
    from troth.weights.upload import release

    memory, resolved = planned.plan, planned.resolved
    require_fit(planned)
    started = time.monotonic()
    if resolved.is_cpu:
        torch.set_num_threads(resolved.num_threads)
    providers = registry.activate(options.providers)
    device, dtype = torch.device(resolved.device), getattr(torch, resolved.dtype)
    place = Placement(device=device, dtype=dtype, context_tokens=memory.context_tokens)
    model = planned.recognised.load(place, lambda done, total: progress("reading weights", done, total))
    kv_dtype = getattr(torch, resolved.kv_dtype)
    specs = _cache_specs(model.config, resolved.kv_dtype)
    if not resolved.is_cpu:
        release()
        progress("warming up", 0, 1)
        planned = _measured(planned, model, specs, kv_dtype, device)
        memory = planned.plan
        progress("warming up", 1, 1)
    groups = attention_groups(specs)
    num_blocks = tuple(group.num_blocks for group in memory.groups)
    cache = CacheStorage(specs, num_blocks, memory.max_rows, dtype=kv_dtype, device=device)
    batches, decodes = step_builders(
        model, cache, groups, max_rows=memory.max_rows, context_tokens=memory.context_tokens, device=device
    )
    checkpoints = CheckpointStorage(cache, memory.num_checkpoints) if memory.num_checkpoints else None
    grammars = RowGrammars(text.grammars(model.config.vocab_size))
    runner = ModelRunner(model, cache, batches, decodes, checkpoints, grammars)
    limits = SchedulerLimits(
        groups=groups,
        num_blocks=num_blocks,
        max_rows=memory.max_rows,
        max_waiting=options.max_waiting,
        chunk_tokens=resolved.chunk_tokens,
        step_tokens=resolved.step_tokens,
        context_tokens=memory.context_tokens,
        prompt_cache=True,
        num_checkpoints=memory.num_checkpoints,
        checkpoint_bytes=memory.bytes_per_checkpoint,
        checkpoint_interval_tokens=checkpoint_interval(specs, resolved.chunk_tokens),
    )
    scheduler = Scheduler(limits)
    disk = _disk_cache(planned, [one.name for one in providers if one.active], scheduler, cache, checkpoints)
    loop = EngineLoop(
        scheduler,
        runner,
        text.tokenizer,
        clock=time.monotonic,
        pipeline_depth=pipeline_depth(device),
        consumer_idle_s=options.consumer_idle_s,
        grammars=grammars,
        disk=disk,
    )
    info = EngineInfo(
        model=planned.name,
        family=planned.recognised.family,
        context_tokens=limits.largest_request,
        max_rows=memory.max_rows,
        vocab_size=model.config.vocab_size,
        max_waiting=options.max_waiting,
        device=resolved.device,
        dtype=resolved.dtype,
        kv_dtype=resolved.kv_dtype,
        pipeline_depth=pipeline_depth(device),
        plan=memory,
        load_s=time.monotonic() - started,
    )

    def downgrades() -> tuple[str, ...]:
        return registry.fallbacks() + runner.downgrades + (() if disk is None else disk.downgrades)

    return EngineThread(loop, info, clock=time.monotonic, downgrades=downgrades)


def _disk_cache(
    planned: Planned,
    providers: Sequence[str],
    scheduler: Scheduler,
    cache: CacheStorage,
    checkpoints: CheckpointStorage | None,
) -> DiskCache | None:
    """The prompt cache's disk tier, where one is asked for and there is a prompt cache."""
    from troth.cache.disk_names import cache_namespace
    from troth.cache.disk_tier import DiskTier
    from troth.cache.host_copies import HostCopies
    from troth.run.disk_cache import DiskCache

    options, resolved = planned.engine, planned.resolved
    if options.disk_cache in (None, NO_DISK_CACHE) or scheduler.prefix_index is None:
        return None
    assert options.disk_cache is not None
    namespace = cache_namespace(
        artifact=planned.recognised.artifact.fingerprint(),
        dtype=resolved.dtype,
        kv_dtype=resolved.kv_dtype,
        compute=f"{resolved.device.partition(':')[0]} {' '.join(providers)}",
    )
    folder, label = Path(options.disk_cache).expanduser(), f"{planned.name}, {resolved.kv_dtype}"
    tier = DiskTier(folder, namespace, quota_bytes=options.disk_cache_bytes, label=label)
    return DiskCache(scheduler, tier, HostCopies(cache, checkpoints), time.monotonic)


def _measured(
    planned: Planned, model: Model, specs: tuple[CacheSpec, ...], kv_dtype: torch.dtype, device: torch.device
) -> Planned:
    """The plan once more, with what a step really takes of the device. Raises ModelLoadError when it does not fit."""
    import torch

    from troth.run.warmup import measure_transient_bytes

    resolved = planned.resolved
    weights_bytes = torch.cuda.memory_allocated(device)
    transient_bytes = measure_transient_bytes(
        model,
        specs,
        step_tokens=min(resolved.step_tokens, planned.plan.context_tokens),
        max_rows=resolved.max_rows,
        kv_dtype=kv_dtype,
        device=device,
    )
    torch.cuda.empty_cache()
    memory = _memory_plan(model.config, resolved, planned.model, planned.engine, weights_bytes, transient_bytes)
    measured = replace(planned, plan=memory)
    require_fit(measured)
    return measured


def build_engine(options: dict[str, Any], progress: LoadProgress = no_progress) -> EngineThread:
    """A ``runtime.engine_process.EngineFactory``: everything from finding the model to a running engine.

    Args:
        options: ``model`` and ``engine``, each the fields of its option class as JSON gives them back.
        progress: told how far loading is.

    Raises:
        ModelLoadError, OptionError, OutOfMemory: as the functions above.
    """
    model, engine = ModelOptions(**options["model"]), EngineOptions(**options["engine"])
    if engine.providers is not None:
        engine = replace(engine, providers=tuple(engine.providers))  # JSON knows no tuples
    artifact = find(model)
    return start_engine(plan(artifact, model, engine), load_text(artifact, model), engine, progress)


def disk_folder(folder: Path) -> DiskFolder:
    """The disk cache in a folder, to look at and to clean; makes it if it is not there, and gives up nothing."""
    from troth.cache.disk_folder import DiskFolder

    return DiskFolder(folder, quota_bytes=2**63 - 1)


def provider_status(order: tuple[str, ...] | None = None) -> tuple[ProviderStatus, ...]:
    """Fix the order of op providers for this process and tell which are in use, and why the others are not.

    Raises:
        OptionError: a provider in ``order`` is unknown or cannot run here.
    """
    from troth.ops import registry

    return registry.activate(order)


def require_fit(planned: Planned) -> None:
    """Refuse a plan that does not fit, with the numbers and the nearest plan that does.

    Raises:
        ModelLoadError: naming bytes wanted and usable, and the options to change.
    """
    from troth.config.nearest_plan import nearest_plan

    memory, artifact = planned.plan, planned.recognised.artifact
    if memory.fits:
        return
    nearest = nearest_plan(lambda m, e: plan(artifact, m, e).plan, memory, planned.model, planned.engine)
    advice = f"What does fit: {nearest[0]}" if nearest else "No smaller context, cache format or batch fits either"
    states = memory.state_bytes + memory.checkpoint_bytes
    raise ModelLoadError(
        f"does not fit: {memory.total_bytes} bytes wanted (weights {memory.weights_bytes}, cache {memory.kv_bytes}, "
        f"state {states}, workspace {memory.transient_bytes}, reserve {memory.reserve_bytes}), "
        f"{memory.usable_bytes} usable on {memory.device}. {advice}.",
        path=str(artifact.root),
    )


def _cache_specs(config: FamilyConfig, kv_dtype: str) -> tuple[CacheSpec, ...]:
    from troth.config.resolve import ELEMENT_BYTES, SCALE_BYTES
    from troth.contracts.cache_spec import with_scales

    return with_scales(config.cache_specs(ELEMENT_BYTES[kv_dtype]), SCALE_BYTES.get(kv_dtype, 0))


def _weights_bytes(artifact: Artifact, device: str, dtype: str, options: EngineOptions) -> int:
    """What the weights will take: as stored where the CPU kernels compute on that, else dense in ``dtype``."""
    from troth.config.resolve import ELEMENT_BYTES
    from troth.ops.impl import cpu

    wanted = options.providers is None or "cpu" in options.providers
    if device == "cpu" and dtype == "float32" and wanted and cpu.unavailable() is None:
        return int(artifact.weight_bytes * cpu.PACKED_GROWTH)
    return _num_parameters(artifact) * ELEMENT_BYTES[dtype]


def _num_parameters(artifact: Artifact) -> int:
    """Numbers in all tensors of an artifact."""
    if artifact.gguf is not None:
        return sum(prod(tensor.shape) for tensor in artifact.gguf.tensors.values())
    assert artifact.safetensors is not None, artifact.kind
    return sum(prod(tensor.shape) for shard in artifact.safetensors.shards for tensor in shard.tensors.values())
