"""A model about to be loaded: device, numbers, pools and context, decided from headers and options alone.

Refuses to read weights and to ask the machine: facts come in, ``assemble.py`` loads. Read next: ``config/resolve.py``
and ``schedule/sizing.py``, which decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from troth.artifact.artifact import Artifact
from troth.cache.disk_names import cache_namespace
from troth.config.facts import MachineFacts
from troth.config.nearest_plan import nearest_plan
from troth.config.options import EngineOptions, ModelOptions
from troth.config.resolve import ELEMENT_BYTES, SCALE_BYTES, Resolved, resolve
from troth.contracts.cache_spec import CacheSpec, attention_groups, recurrent_bytes, with_guests, with_scales
from troth.contracts.memory_plan import MemoryPlan
from troth.errors import ModelLoadError, OptionError
from troth.models.registry import Recognised, recognise
from troth.ops.impl import cpu
from troth.run.graphs import DRAFT_WIDTHS, MOST_DRAFT_TOKENS
from troth.run.head_decision import WITHOUT_HEAD, HeadDecision
from troth.schedule.sizing import CACHE_SHARE, GPU_CACHE_SHARE, Demand, plan_memory
from troth.weights.fp8 import fp8_bytes, fp8_refusal
from troth.weights.rounded_inputs import rounded_inputs_refusal

MIN_SAMPLES: Final = 64
"""Also the prompt positions whose log-probabilities are computed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A model for which everything is decided and nothing is read yet."""

    recognised: Recognised
    resolved: Resolved
    plan: MemoryPlan
    model: ModelOptions
    engine: EngineOptions
    facts: MachineFacts
    """What the machine had to offer when this was decided."""
    head: HeadDecision = WITHOUT_HEAD
    """Whether the draft head is loaded; ``recognised`` has it then."""
    draft_model: Recognised | None = None
    """The model that drafts for this one; None: no other does."""

    @property
    def name(self) -> str:
        """The name the model is served under."""
        return self.model.name or self.recognised.artifact.name

    @property
    def specs(self) -> tuple[CacheSpec, ...]:
        """What the model caches, its draft model's layers included, in the numbers decided on."""
        return _cache_specs(self.recognised, self.draft_model, self.resolved)

    @property
    def draft_specs(self) -> tuple[CacheSpec, ...]:
        """What the draft model would cache by itself; nothing without one."""
        return () if self.draft_model is None else _cache_specs(self.draft_model, None, self.resolved)

    def measured(self, *, weights_bytes: int, transient_bytes: int) -> Planned:
        """The same once it is known what the weights and a step really take."""
        memory = _memory_plan(
            self.recognised,
            self.draft_model,
            self.resolved,
            self.model,
            self.engine,
            weights_bytes=weights_bytes,
            transient_bytes=transient_bytes,
        )
        decisions = (*memory.decisions, f"workspace {transient_bytes} bytes: measured")
        return replace(self, plan=replace(memory, decisions=decisions, disk_cache=self.plan.disk_cache))


def plan_model(
    artifact: Artifact,
    model: ModelOptions,
    engine: EngineOptions,
    facts: MachineFacts,
    head: HeadDecision = WITHOUT_HEAD,
    draft_model: Recognised | None = None,
) -> Planned:
    """Decide everything else that loading a model needs decided.

    Args:
        artifact: the model.
        model: options.
        engine: options.
        facts: what the machine has.
        head: whether its draft head is loaded.
        draft_model: loaded beside it (``draft_model.py`` checked that it can be); None: no other model is.

    Raises:
        ModelLoadError: the architecture or its config is not supported.
        OptionError: an option cannot be honoured.
    """
    recognised = recognise(artifact)
    if head.refusal is None and model.inputs is not None:
        raise OptionError(
            "inputs int8 has no certificate for a draft head: leave it out, or mtp where drafts come from"
        )
    if head.refusal is None:
        recognised = recognised.with_draft_head()
    resolved = resolve(model, engine, facts)
    weights_bytes = _weights_bytes(artifact, resolved, engine)
    if resolved.weights is not None:
        _require_roundable(recognised)
        weights_bytes = fp8_bytes(artifact, ELEMENT_BYTES[resolved.dtype])
    if resolved.inputs is not None:
        _require_rounded_inputs(recognised, resolved, engine)
    if draft_model is not None:
        weights_bytes += _weights_bytes(draft_model.artifact, resolved, engine)
    loaded = (recognised,) if draft_model is None else (recognised, draft_model)
    memory = _memory_plan(
        recognised,
        draft_model,
        resolved,
        model,
        engine,
        weights_bytes=weights_bytes,
        transient_bytes=max(_transient_bytes(one, resolved) for one in loaded),
    )
    return Planned(
        recognised=recognised,
        resolved=resolved,
        plan=memory,
        model=model,
        engine=engine,
        facts=facts,
        head=head,
        draft_model=draft_model,
    )


def namespace_of(planned: Planned, artifact: str, providers: Sequence[str]) -> str:
    """What keeps cached state of a planned model apart from that of others (``cache_namespace``).

    Args:
        artifact: what stands for its files: their fingerprint on this machine, their digest on all.
        providers: names of the active op providers; numbers that others computed are not taken for theirs.
    """
    resolved = planned.resolved
    weights = "" if resolved.weights is None else f" with weights {resolved.weights}"
    inputs = "" if resolved.inputs is None else f" with inputs {resolved.inputs}"
    drafts = "" if planned.head.refusal is not None else " with draft head"
    if planned.draft_model is not None:
        drafts = f" with draft model {planned.draft_model.artifact.fingerprint()}"
    return cache_namespace(
        artifact=artifact,
        dtype=resolved.dtype,
        kv_dtype=resolved.kv_dtype,
        compute=f"{resolved.device.partition(':')[0]} {' '.join(providers)}{weights}{inputs}{drafts}",
    )


def label_of(planned: Planned) -> str:
    """What people are told a cache holds: the model, and the numbers that set its state apart."""
    resolved = planned.resolved
    named = (("weights", resolved.weights), ("inputs", resolved.inputs))
    return f"{planned.name}, {resolved.kv_dtype}" + "".join(f", {what} {form}" for what, form in named if form)


def max_samples(resolved: Resolved) -> int:
    """Positions of one step whose logits there is room for: one of each row, or of fewer rows with drafts.

    A GPU computes those of 256 tokens in hardly more time than one; each row may have the drafts that captures do.
    """
    of_drafts = 0 if resolved.is_cpu else min(max(DRAFT_WIDTHS) * resolved.max_rows, MOST_DRAFT_TOKENS)
    return max(resolved.max_rows, MIN_SAMPLES, of_drafts)


def require_fit(planned: Planned) -> None:
    """Refuse a plan that does not fit, with the numbers and the nearest plan that does.

    Raises:
        ModelLoadError: naming bytes wanted and usable, and the options to change.
    """
    memory, artifact = planned.plan, planned.recognised.artifact
    if memory.fits:
        return
    nearest = nearest_plan(
        lambda model, engine: (
            plan_model(artifact, model, engine, planned.facts, planned.head, planned.draft_model).plan
        ),
        memory,
        planned.model,
        planned.engine,
    )
    advice = f"What does fit: {nearest[0]}" if nearest else "No smaller context, cache format or batch fits either"
    states = memory.state_bytes + memory.checkpoint_bytes
    raise ModelLoadError(
        f"does not fit: {memory.total_bytes} bytes wanted (weights {memory.weights_bytes}, cache {memory.kv_bytes}, "
        f"state {states}, workspace {memory.transient_bytes}, reserve {memory.reserve_bytes}), "
        f"{memory.usable_bytes} usable on {memory.device}. {advice}.",
        path=str(artifact.root),
    )


def _memory_plan(
    recognised: Recognised,
    draft_model: Recognised | None,
    resolved: Resolved,
    model: ModelOptions,
    engine: EngineOptions,
    *,
    weights_bytes: int,
    transient_bytes: int,
) -> MemoryPlan:
    memory = plan_memory(
        Demand(
            device=resolved.device,
            dtype=resolved.dtype,
            specs=_cache_specs(recognised, draft_model, resolved),
            weights_bytes=weights_bytes,
            transient_bytes=transient_bytes,
            reserve_bytes=resolved.reserve_bytes,
            usable_bytes=resolved.usable_bytes,
            declared_context_tokens=recognised.config.max_position_embeddings,
            wanted_context_tokens=model.context_tokens,
            max_rows=resolved.max_rows,
            step_tokens=resolved.step_tokens,
            kv_memory_bytes=engine.kv_memory_bytes,
            cache_share=CACHE_SHARE if resolved.is_cpu else GPU_CACHE_SHARE,
        )
    )
    return replace(memory, decisions=resolved.decisions + memory.decisions)


def _cache_specs(recognised: Recognised, draft_model: Recognised | None, resolved: Resolved) -> tuple[CacheSpec, ...]:
    kv_dtype = resolved.kv_dtype
    specs = with_scales(recognised.config.cache_specs(ELEMENT_BYTES[kv_dtype]), SCALE_BYTES.get(kv_dtype, 0))
    if draft_model is None:
        return specs
    return with_guests(specs, attention_groups(_cache_specs(draft_model, None, resolved)))


def _require_roundable(recognised: Recognised) -> None:
    if recurrent_bytes(recognised.config.cache_specs(1)) is not None:
        raise OptionError("weights fp8 is not available for models with recurrent layers; leave it out")
    if (refusal := fp8_refusal(recognised.artifact)) is not None:
        raise OptionError(f"weights fp8 cannot be had of {recognised.artifact.name}: {refusal}; leave it out")


def _require_rounded_inputs(recognised: Recognised, resolved: Resolved, engine: EngineOptions) -> None:
    if (refusal := rounded_inputs_refusal(recognised.artifact)) is not None:
        raise OptionError(f"inputs int8 would change nothing in {recognised.artifact.name}: {refusal}; leave it out")
    if not _has_kernels(resolved, engine):
        why = cpu.unavailable() or "name cpu among the providers"
        raise OptionError(f"inputs int8 needs the C++ kernels: {why}; or leave it out")


def _weights_bytes(artifact: Artifact, resolved: Resolved, engine: EngineOptions) -> int:
    """What the weights will take: as stored where the CPU kernels compute on that, else dense in the model's dtype."""
    if _has_kernels(resolved, engine):
        return int(artifact.weight_bytes * cpu.PACKED_GROWTH)
    return artifact.num_values * ELEMENT_BYTES[resolved.dtype]


def _has_kernels(resolved: Resolved, engine: EngineOptions) -> bool:
    """Whether the CPU's own kernels compute."""
    wanted = engine.providers is None or "cpu" in engine.providers
    return resolved.is_cpu and resolved.dtype == "float32" and wanted and cpu.unavailable() is None


def _transient_bytes(recognised: Recognised, resolved: Resolved) -> int:
    """Activations of the largest step, and the logits of its rows with what a draw makes of them."""
    config = recognised.config
    per_token = (6 * config.hidden_size + 3 * config.intermediate_size) * ELEMENT_BYTES[resolved.dtype]
    return resolved.step_tokens * per_token + 3 * max_samples(resolved) * config.vocab_size * 4
