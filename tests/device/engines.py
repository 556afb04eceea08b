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
from troth.contracts.cache_spec import attention_groups
from troth.models.family import Placement
from troth.models.registry import recognise
from troth.run.decode_steps import pipeline_depth, step_builders
from troth.run.drafting import Drafting
from troth.run.engine import EngineLoop
from troth.run.grammar import RowGrammars
from troth.run.runner import ModelRunner
from troth.schedule.scheduler import Scheduler
from troth.testing.byte_tokenizer import ByteTokenizer
from troth.text.grammar import GrammarCompiler


def builder(path: Path, device: torch.device, dtype: torch.dtype) -> laws.BuildEngine:
    """Builds engines over one model, with the steps that its device has."""
    model = recognise(resolve(path)).load(Placement(device=device, dtype=dtype, context_tokens=CONTEXT))
    specs = model.config.cache_specs(dtype.itemsize)
    groups = attention_groups(specs)
    compiler = GrammarCompiler(ByteTokenizer(), VOCAB)

    def build(serving: laws.Serving) -> tuple[EngineLoop, Scheduler]:
        limits = serving.limits(specs, CONTEXT)
        cache = CacheStorage(specs, limits.num_blocks, serving.max_rows, dtype=dtype, device=device)
        scheduler = Scheduler(limits)
        batches, decodes = step_builders(
            model, cache, groups, max_rows=serving.max_rows, context_tokens=CONTEXT, device=device
        )
        grammars = RowGrammars(compiler)
        checkpoints = CheckpointStorage(cache, serving.num_checkpoints)
        runner = ModelRunner(model, cache, batches, decodes, checkpoints, grammars)
        ticks = count()
        loop = EngineLoop(
            scheduler,
            runner,
            ByteTokenizer(),
            clock=lambda: float(next(ticks)),
            pipeline_depth=pipeline_depth(device),
            grammars=grammars,
            drafting=Drafting(scheduler, lambda: float(next(ticks)), forced_ids=grammars.forced_ids),
        )
        if device.type == "cuda":
            assert decodes is not None
            assert decodes.refusal is None
        return loop, scheduler

    return build
