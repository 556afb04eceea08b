"""Captured steps of a hybrid by Triton's interpreter on the CPU; run by ``test_op_triton.py``.

A replay must follow from what lies on the device alone. Here the host's lists are spoilt before the step is computed,
and fresh memory is NaN, so that whatever padding reads or leaves behind shows.
"""

from __future__ import annotations

import pytest
import torch
import transformers

import tests.cpu.triton_kernels  # noqa: F401 - what the interpreter lacks
from tests.cpu.captured_steps import Side, prompts, run_again, steps
from tests.cpu.tiny_models import CPU, DENSE, SMALL_HYBRID, load, random_model, save
from troth.cache.storage import CacheStorage
from troth.contracts.cache_spec import attention_groups
from troth.contracts.names import BLOCK_TOKENS
from troth.contracts.plan import StepPlan
from troth.models.family import Model, Placement
from troth.nn.batch import Batch
from troth.ops import registry
from troth.ops.attention import attention
from troth.ops.gated_delta import gated_delta
from troth.ops.impl.triton_attention_whole import LEAST_TOKENS, ROUNDED_TOKENS
from troth.ops.rotary_kv_write import rotary_kv_write
from troth.ops.short_conv import short_conv
from troth.run import rehearsal
from troth.run.answer_inputs import AnswerInputs
from troth.run.device_batch import DeviceBatches

pytestmark = pytest.mark.usefixtures("fresh_memory_is_nan")
NONSENSE = -(10**6)
PLACE = Placement(device=CPU, dtype=torch.float32, context_tokens=64)
LOOKS_ACROSS = (attention, gated_delta, rotary_kv_write, short_conv)
"""The ops that know rows, positions or slots; the interpreter is slow, so the others are PyTorch's."""


def compute_with(provider: str) -> None:
    for op in registry.OPS.values():
        op.activate((provider if op in LOOKS_ACROSS else "torch",))


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    registry.activate(("triton", "torch"))
    compute_with("torch")
    config = transformers.Qwen3_5TextConfig(
        **DENSE
        | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
        | SMALL_HYBRID
        | {"layer_types": SMALL_HYBRID["layer_types"][:2], "linear_num_key_heads": 1, "linear_num_value_heads": 2},
    )
    return load(save(random_model(config), tmp_path_factory.mktemp("qwen3_5")), context_tokens=PLACE.context_tokens)


class Blind(DeviceBatches):
    """What the host knows of a captured step is wrong."""

    def fill(self, inputs: AnswerInputs, plan: StepPlan) -> None:
        super().fill(inputs, plan)
        inputs.num_new[:] = inputs.starts[:] = [NONSENSE] * inputs.num_rows


def test_captured_steps_with_drafts_compute_what_ordinary_ones_do_from_the_device_alone(model: Model) -> None:
    compute_with("triton")  # as its kernels want caches to lie
    ordinary, captured = Side(model, run_again, PLACE), Side(model, run_again, PLACE, Blind)
    for side in (ordinary, captured):
        side.ordinary(prompts(num_groups=1))
    for plan in steps():
        compute_with("torch")
        want = ordinary.ordinary(plan)
        compute_with("triton")
        torch.testing.assert_close(captured.captured(plan), want, rtol=1e-4, atol=1e-4)
        rows = [int(row) for row in plan.rows]
        for layer, tensors in ordinary.cache.states.items():
            for state, other in zip(tensors, captured.cache.states[layer], strict=True):
                torch.testing.assert_close(other[rows], state[rows], rtol=1e-4, atol=1e-4)
            # Rows that nobody computes keep what they had.
            assert not any(state[[1, 3]].any() for state in captured.cache.states[layer])
            assert not any(trail[[1, 3]].any() for trail in captured.cache.trails[layer])
    assert [(shape.rows, shape.tokens, shape.width) for shape in captured.graphs._captured] == [(4, 8, 4)]


def test_rehearsal_computes_steps_of_every_width_and_leaves_caches_alone(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "MOST_TOKENS", 4)  # so that the interpreter ends
    seen, forward = list[tuple[int, int, int]](), type(model).forward

    def watched(self: Model, batch: Batch, cache: CacheStorage) -> torch.Tensor:
        rows = batch.rows
        seen.append((rows.num_rows, len(batch.token_ids_T), rows.max_new))
        assert all(kv.block_table_RB.shape == (rows.num_rows, 4) for kv in batch.groups)
        return forward(self, batch, cache)

    compute_with("triton")
    side = Side(model, run_again, PLACE)
    compute_with("torch")
    side.ordinary(prompts(num_groups=1))
    monkeypatch.setattr(type(model), "forward", watched)
    compute_with("triton")
    before = [tensor.clone() for tensor in side.cache.tensors()]
    groups = attention_groups(model.config.cache_specs(PLACE.dtype.itemsize))
    pieces = rehearsal.rehearsal(
        model,
        side.cache,
        groups,
        max_rows=2,
        context_tokens=PLACE.context_tokens,
        step_tokens=32,
        dtype=PLACE.dtype,
        device=CPU,
    )
    assert not seen
    num_pieces = len(list(pieces))
    assert num_pieces == len(seen)
    for was, tensor in zip(before, side.cache.tensors(), strict=True):
        assert torch.equal(was.nan_to_num(), tensor.nan_to_num())
        assert torch.equal(was.isnan(), tensor.isnan())
    of_rows = [(rows, rows, width) for rows in (1, 2) for width in (1, 2, 4, 8)]
    assert seen == [*of_rows, (1, 2, 8), (1, 4, 8), (1, 16, 16)]


def test_rehearsal_computes_whole_prompts_of_each_length_that_has_a_plan_of_its_own() -> None:
    """Or the first request of such a length waits for cuDNN."""
    assert (rehearsal.WHOLE_TOKENS, rehearsal.WHOLE_APART) == (LEAST_TOKENS, ROUNDED_TOKENS)
    whole = [step for step in rehearsal.steps(4, (8, 256), 8192) if step.width >= LEAST_TOKENS]
    assert [(step.tokens, step.width, step.context) for step in whole] == [(n, n, n) for n in range(1024, 2049, 256)]
    assert all(step.blocks * BLOCK_TOKENS >= step.tokens for step in whole), "their blocks are in the table"
    assert [step.tokens for step in rehearsal.steps(4, (8, 90), 8192) if step.width >= LEAST_TOKENS] == [
        1024,
        1280,
        1440,
    ]
    assert [step.tokens for step in rehearsal.steps(4, (8, 80), 8192) if step.width >= LEAST_TOKENS] == [1024, 1280]
    assert [step.tokens for step in rehearsal.steps(4, (8, 256), 1030) if step.width >= LEAST_TOKENS] == [1024, 1030]
    assert not [step for step in rehearsal.steps(4, (8, 256), 1000) if step.width >= LEAST_TOKENS]
