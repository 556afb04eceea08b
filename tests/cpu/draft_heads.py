"""Tiny random hybrids with a draft head, and engines over them.

The vocabulary is so small that a random head is right now and then, and wrong often enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from torch import Tensor

from tests import laws
from tests.cpu.disk_blocks import disk_cache
from tests.cpu.tiny_models import CONTEXT, CPU, DENSE, SMALL_HYBRID, random_model, save
from troth.artifact.resolve import resolve
from troth.cache.checkpoints import CheckpointStorage
from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import attention_groups
from troth.contracts.grammar import Grammar
from troth.contracts.names import RequestId
from troth.contracts.plan import StepPlan
from troth.draft.made import MadeTerms
from troth.models.family import Model, Placement
from troth.models.hybrid_config import HybridConfig
from troth.models.plain_head import PlainHead
from troth.models.registry import recognise
from troth.ops.impl import cpu
from troth.ops.linear import linear
from troth.run.batch import BatchBuilder
from troth.run.capture import Capture
from troth.run.device_batch import DeviceBatches
from troth.run.drafting import Drafting
from troth.run.engine import EngineLoop
from troth.run.grammar import RowGrammars
from troth.run.graphs import DecodeGraphs
from troth.run.made_drafts import MadeDrafts
from troth.run.recorded import RecordedDecode
from troth.run.runner import Batches, DecodeSteps, ModelRunner
from troth.schedule.scheduler import Scheduler
from troth.testing.byte_tokenizer import ByteTokenizer
from troth.text.detokenize import TokenBytes
from troth.text.grammar import GrammarCompiler
from troth.weights.source import WeightSource

VOCAB = 6
GRAMMAR = Grammar(kind="regex", source="(\x00\x05\x04\x04|[\x01\x02])+")
"""Of the six tokens: three may begin a part, and one of them leaves no choice about three more."""
_HYBRID: dict[str, Any] = {**SMALL_HYBRID, "mtp_num_hidden_layers": 1}
_SIZES: dict[str, Any] = {**DENSE, "vocab_size": VOCAB, "num_hidden_layers": 3}
CONFIG: Any = transformers.Qwen3_5TextConfig(**_SIZES, **_HYBRID)


def save_with_head(folder: Path, seed: int = 0, config: Any = CONFIG) -> Path:
    """A random hybrid with a random draft head, as published checkpoints hold one; layer 1 is of full attention."""
    save(random_model(config, seed), folder)
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    of_attention = "model.layers.1."
    for name in [name for name in tensors if name.startswith(of_attention)]:
        tensors[f"mtp.layers.0.{name.removeprefix(of_attention)}"] = _random_like(tensors[name])
    width = config.hidden_size
    tensors["mtp.fc.weight"] = torch.randn(width, 2 * width) * (2 * width) ** -0.5
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = torch.randn(width) * 0.3
    safetensors.torch.save_file(tensors, path)
    return folder


def save_with_head_of_experts(folder: Path, *, stacked: bool) -> Path:
    """The same with experts, of the head one by one or ``stacked`` in two tensors, as Qwen3.5's files have them."""
    config = transformers.AutoConfig.for_model(
        "qwen3_5_moe_text",
        **{key: value for key, value in _SIZES.items() if key != "intermediate_size"},
        **_HYBRID,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    save_with_head(folder, config=config)
    if stacked:
        path, at = folder / "model.safetensors", "mtp.layers.0.mlp.experts."
        tensors = safetensors.torch.load_file(path)
        gate, up, down = (
            torch.stack([tensors.pop(f"{at}{expert}.{name}_proj.weight") for expert in range(config.num_experts)])
            for name in ("gate", "up", "down")
        )
        tensors |= {f"{at}gate_up_proj": torch.cat((gate, up), dim=1), f"{at}down_proj": down}
        safetensors.torch.save_file(tensors, path)
    return folder


def _random_like(tensor: Tensor) -> Tensor:
    return torch.randn_like(tensor) * (tensor[0].numel() ** -0.5 if tensor.dim() > 1 else 0.3)


def load_with_head(folder: Path, *, context_tokens: int = CONTEXT) -> Model:
    """The artifact as a model of ours, its draft head with it."""
    place = Placement(device=CPU, dtype=torch.float32, context_tokens=context_tokens)
    return recognise(resolve(folder)).with_draft_head().load(place)


@dataclass(frozen=True)
class Drafted:
    """What was drafted behind one position of one request."""

    request_id: RequestId
    position: int
    """Of the last known token."""
    token_ids: list[int]


class HeadEngines:
    """Builds engines over one model, and notes what their heads draft."""

    def __init__(
        self,
        model: Model,
        *,
        context_tokens: int = CONTEXT,
        tokenizer: TokenBytes | None = None,
        capture: Capture | None = None,
    ) -> None:
        """``capture``: as on a GPU, of passes of the head alone."""
        self.model = model
        self._capture = capture
        self.drafted: list[Drafted] = []
        self._context_tokens = context_tokens
        self._tokenizer = tokenizer or ByteTokenizer()
        self._compiler = GrammarCompiler(ByteTokenizer(), VOCAB)

    def __call__(self, serving: laws.Serving) -> tuple[EngineLoop, Scheduler]:
        """As laws.BuildEngine. What was never written to the caches is NaN."""
        specs = self.model.config.cache_specs(4)
        limits = serving.limits(specs, self._context_tokens)
        cache = CacheStorage(specs, limits.num_blocks, serving.max_rows, dtype=torch.float32, device=CPU)
        for tensor in [*cache.frontiers.values(), *(t for kv in cache.kv.values() for t in (kv.k_NKDS, kv.v_NKSD))]:
            tensor.fill_(torch.nan)
        scheduler, ticks = Scheduler(limits), count()
        groups, rows, tokens = attention_groups(specs), serving.max_rows, self._context_tokens
        batches: Batches
        recorded: DecodeSteps | None = None
        if self._capture is not None:
            batches = on_device = DeviceBatches(groups, rows, tokens, CPU)
            why = "recurrent layers compute no padding without triton"
            recorded = DecodeGraphs(
                self.model, cache, on_device, self._capture, max_rows=rows, context_tokens=tokens, refusal=why
            )
        else:
            batches = host = BatchBuilder(groups, rows, tokens)
            if "cpu" in linear.active:
                recorded = RecordedDecode(self.model, cache, host, cpu.recording)
        checkpoints, grammars = CheckpointStorage(cache, serving.num_checkpoints), RowGrammars(self._compiler)
        runner = ModelRunner(self.model, cache, batches, recorded, checkpoints, grammars)
        assert runner._made is not None
        self._note_drafts(runner._made)
        drafting = Drafting(
            scheduler,
            lambda: float(next(ticks)),
            forced_ids=grammars.forced_ids,
            made={"mtp": MadeTerms(refusal=None, failure=lambda: runner.made_drafts_failure)},
        )
        disk = disk_cache(serving.disk_folder, scheduler, cache, checkpoints) if serving.disk_folder else None
        loop = EngineLoop(
            scheduler,
            runner,
            self._tokenizer,
            clock=lambda: float(next(ticks)),
            grammars=grammars,
            disk=disk,
            drafting=drafting,
        )
        return loop, scheduler

    def _note_drafts(self, head: MadeDrafts) -> None:
        fill = head.fill

        def noted(plan: StepPlan) -> StepPlan:
            filled = fill(plan)
            for i, num_drafts in enumerate(plan.num_draft):
                if num_drafts and filled is not plan:
                    self.drafted.append(Drafted(plan.request_ids[i], plan.starts[i], filled.drafts_of(i)))
            return filled

        head.fill = noted  # type: ignore[method-assign]


class Reference:
    """Hidden states by transformers, and drafts from them by the plain computation of the head."""

    def __init__(self, folder: Path) -> None:
        recognised = recognise(resolve(folder)).with_draft_head()
        assert isinstance(recognised.config, HybridConfig)
        self._head = PlainHead(recognised.config, WeightSource(recognised.artifact), CONTEXT)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )

    @torch.inference_mode()
    def hidden(self, token_ids: Sequence[int]) -> Tensor:
        """Final hidden states of every token, float32 [T, D]."""
        hidden_TD: Tensor = self._model.model(torch.tensor([list(token_ids)]), use_cache=False).last_hidden_state[0]
        return hidden_TD

    def drafts(self, token_ids: Sequence[int], hidden_TD: Tensor, num_drafts: int) -> list[Tensor]:
        """As PlainHead.drafts."""
        return self._head.drafts(token_ids, hidden_TD, num_drafts)
