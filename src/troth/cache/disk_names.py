"""Names of cached blocks that mean the same in every process: chained SHA-256 of what determines their content.

Refuses to know files and tensors. The prompt cache in memory needs none of this (docs/adr/0007): it compares tokens.

    root = SHA-256(namespace, salt)        name of block i = SHA-256(name of block i - 1, its 16 token ids)
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import Final

from troth.contracts.names import BLOCK_TOKENS

BundleKind = str
"""``kv0``, ``kv1``...: keys and values that an attention group keeps of blocks; ``state``: the recurrent state at the
end of one.
"""
STATE: Final = "state"
LAYOUT_VERSION: Final = 1
"""Raised by one whenever a block's tensors change their meaning or layout."""


def kv_kind(group: int) -> BundleKind:
    """What an attention group's blocks are called."""
    return f"kv{group}"


def cache_namespace(*, artifact: str, dtype: str, kv_dtype: str, compute: str) -> str:
    """What keeps caches of unlike models and numbers apart, as hex.

    Args:
        artifact: fingerprint or digest of the model's files.
        dtype: of activations.
        kv_dtype: of keys and values.
        compute: device and op providers, whose sums differ in their last bits.
    """
    parts = (artifact, dtype, kv_dtype, f"layout {LAYOUT_VERSION}", f"block {BLOCK_TOKENS}", compute)
    return sha256("\0".join(parts).encode()).hexdigest()


def block_names(namespace: str, salt: str, token_ids: Sequence[int]) -> list[bytes]:
    """The names of the whole blocks of ``token_ids``, 32 bytes each."""
    name = sha256(f"{namespace}\0{salt}".encode("utf-8", "surrogatepass")).digest()
    names: list[bytes] = []
    for at in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        name = sha256(name + array("q", token_ids[at : at + BLOCK_TOKENS]).tobytes()).digest()
        names.append(name)
    return names
