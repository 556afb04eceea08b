"""Distinct names for integers and strings that must not be mixed up, and the fixed sizes of the design."""

from __future__ import annotations

from typing import Final, NewType

RequestId = NewType("RequestId", str)
BlockId = NewType("BlockId", int)
CheckpointId = NewType("CheckpointId", int)
"""Place of a saved recurrent state, over all recurrent layers."""
Row = NewType("Row", int)
"""Place of a running request in the persistent batch: 0 <= row < max_rows, reused after release."""

BLOCK_TOKENS: Final = 16
"""Tokens per KV cache block (docs/adr/0002)."""

NO_BLOCK: Final = BlockId(-1)
"""Pads block tables: an entry that holds nothing and must never be read."""

NO_ROW: Final = Row(-1)
"""A request that has no place in the batch."""
