"""What decode steps hand to each other on the pool's threads: numbers that the host staged, tokens that were drawn."""

from __future__ import annotations

from torch import Tensor

from troth.ops.impl import cpu


def feed(staged: Tensor, inputs: Tensor, token_id_R: Tensor, row_R: Tensor, last_token: Tensor) -> None:
    """Copy a step's numbers to where its operations read them; tokens that are ON_DEVICE become the rows' last ones.

    Args:
        staged: uint8, what the host wrote.
        inputs: uint8 of the same size.
        token_id_R, row_R: int64 [R], views of ``inputs``.
        last_token: int64 [rows].
    """
    operations = cpu.operations(staged, inputs, last_token, results=())
    operations.feed(
        staged.data_ptr(),
        inputs.data_ptr(),
        staged.numel(),
        token_id_R.data_ptr(),
        row_R.data_ptr(),
        last_token.data_ptr(),
        len(row_R),
    )


def note(token_R: Tensor, row_R: Tensor, last_token: Tensor) -> None:
    """Remember the tokens drawn, int64 [R], as the last ones of their rows, int64 [R]."""
    operations = cpu.operations(token_R, row_R, last_token, results=())
    operations.note(token_R.data_ptr(), row_R.data_ptr(), last_token.data_ptr(), len(row_R))
