"""Engines over tiny models on a device, with the steps that it has."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import torch

from tests import laws
from tests.cpu.tiny_models import CONTEXT, VOCAB
from troth.artifact.resolve import resolve
from troth.cache.checkpoints import CheckpointStorage
from troth.cache.storage import CacheStorage
from troth.config.options import Weights
from troth.config.resolve import SCALE_BYTES
from troth.contracts.cache_spec import attention_groups, with_guests, with_scales
from troth.contracts.speculation import DraftSourceName
from troth.draft.made import MadeTerms
from troth.models.family import Placement
from troth.models.registry import recognise
from troth.ops.layer_kv import dtype_of
from troth.run.decode_steps import pipeline_depth, step_builders
from troth.run.drafting import Drafting
from troth.run.engine import EngineLoop
from troth.run.grammar import RowGrammars
from troth.run.runner import ModelRunner
from troth.schedule.scheduler import Scheduler
from troth.testing.byte_tokenizer import ByteTokenizer
from troth.text.grammar import GrammarCompiler


def builder(
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    kv_name: str | None = None,
    weights: Weights | None = None,
    head: bool = False,
    draft_path: Path | None = None,
) -> laws.BuildEngine:
    """Builds engines over one model, with the steps that its device has; by default its cache is of ``dtype``.

    Args:
        path: of the model.
        device: where it runs.
        dtype: of activations.
        kv_name: of what keys and values are held in.
        weights: what the matrices are held in.
        head: whether its draft head is loaded.
        draft_path: of a model that drafts for it.
    """
    place = Placement(device=device, dtype=dtype, context_tokens=CONTEXT, weights=weights)
    recognised = recognise(resolve(path))
    model = (recognised.with_draft_head() if head else recognised).load(place)
    kv_dtype = dtype if kv_name is None else dtype_of(kv_name)
    specs = with_scales(model.config.cache_specs(kv_dtype.itemsize), SCALE_BYTES.get(kv_name or "", 0))
    draft_model = None if draft_path is None else recognise(resolve(draft_path)).load(place)
    if draft_model is not None:
        specs = with_guests(specs, attention_groups(draft_model.config.cache_specs(kv_dtype.itemsize)))
    groups = attention_groups(specs)
    compiler = GrammarCompiler(ByteTokenizer(), VOCAB)

    def build(serving: laws.Serving) -> tuple[EngineLoop, Scheduler]:
        limits = serving.limits(specs, CONTEXT)
        cache = CacheStorage(specs, limits.num_blocks, serving.max_rows, dtype=kv_dtype, device=device)
        scheduler = Scheduler(limits)
        batches, decodes = step_builders(
            model, cache, groups, max_rows=serving.max_rows, context_tokens=CONTEXT, device=device
        )
        grammars = RowGrammars(compiler)
        checkpoints = CheckpointStorage(cache, serving.num_checkpoints)
        runner = ModelRunner(model, cache, batches, decodes, checkpoints, grammars, draft_model)
        terms = MadeTerms(refusal=None, failure=lambda: runner.made_drafts_failure)
        made: dict[DraftSourceName, MadeTerms] = {"mtp": terms} if head else {"draft": terms} if draft_model else {}
        ticks = count()
        loop = EngineLoop(
            scheduler,
            runner,
            ByteTokenizer(),
            clock=lambda: float(next(ticks)),
            pipeline_depth=pipeline_depth(device),
            grammars=grammars,
            drafting=Drafting(scheduler, lambda: float(next(ticks)), forced_ids=grammars.forced_ids, made=made),
        )
        if device.type == "cuda":
            assert decodes is not None
            assert decodes.refusal is None
        return loop, scheduler

    return build
