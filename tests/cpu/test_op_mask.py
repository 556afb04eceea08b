"""The mask of grammars on the logits of a batch, against its definition bit by bit."""

from __future__ import annotations

import pytest
import torch

from tests.cpu.op_cases import cases, inputs, providers, run
from troth.ops.grid import Case
from troth.ops.mask import mask


@pytest.mark.parametrize("case", cases(mask))
@pytest.mark.parametrize("provider", providers(mask))
def test_mask_equals_the_reference(provider: str, case: Case) -> None:
    ours, wanted = case.make(inputs()), case.make(inputs())
    run(mask, provider, *ours)
    mask.reference(*wanted)
    assert torch.equal(ours[0], wanted[0])


@pytest.mark.parametrize("case", cases(mask))
def test_mask_takes_away_the_tokens_whose_bit_is_not_set_and_no_others(case: Case) -> None:
    logits, rows, words = case.make(inputs())
    before = logits.clone()
    mask(logits, rows, words)
    for r in range(logits.shape[0]):
        allowed = [True] * logits.shape[1]
        if r in rows.tolist():
            bits = words[rows.tolist().index(r)].tolist()
            allowed = [bool(bits[i // 32] >> i % 32 & 1) for i in range(logits.shape[1])]
        assert torch.equal(logits[r], torch.where(torch.tensor(allowed), before[r], -torch.inf))
