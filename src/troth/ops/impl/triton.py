"""The Triton kernels' side of the registry: where they can run, and what their launchers share.

The kernels are the modules ``triton_*.py`` beside this one, which alone import triton. Launchers read lengths, tables,
slots and positions on the device only, and choose grids by shapes alone, so that a step of them can be captured into a
CUDA graph. With TRITON_INTERPRET=1 in the environment Triton's interpreter runs the same kernels on CPU tensors, for
tests. Next: ``triton_attention.py``.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Final

import torch
from torch import Tensor

from troth.config.resolve import FP8_CAPABILITY
from troth.ops.codes import FP8
from troth.ops.layer_kv import LayerKV

INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run on CPU tensors; Triton reads the variable when kernels are defined."""
LEAST_CAPABILITY: Final = (8, 0)
"""The first NVIDIA generation with bfloat16 products and asynchronous copies."""
FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


def unavailable() -> str | None:
    """Why the kernels cannot be used on this machine; None when they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if INTERPRETED:
        return None
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return "PyTorch sees no NVIDIA GPU (TRITON_INTERPRET=1 runs the kernels on the CPU, slowly)"
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        return f"the GPU's compute capability is {capability}, the kernels need {LEAST_CAPABILITY}"
    return None


def takes(x: Tensor) -> bool:
    """Whether a float tensor lies where the kernels run."""
    return x.is_cuda != INTERPRETED and x.dtype in FLOATS


def takes_cache(kv: LayerKV) -> bool:
    """Whether the kernels read and write a cache of this form."""
    k, v = kv.k_NKDS, kv.v_NKSD
    if k.is_cuda == INTERPRETED or k.dtype not in (FLOATS if kv.k_scale_NKS is None else _coded()):
        return False
    return v.dtype == k.dtype and k.is_contiguous() and v.is_contiguous() and v.shape[3] == k.shape[2]


@cache
def _coded() -> tuple[torch.dtype, ...]:
    """The formats of ``ops/codes.py`` that the kernels know here."""
    has_fp8 = INTERPRETED or torch.cuda.get_device_capability() >= FP8_CAPABILITY
    return (torch.int8, FP8) if has_fp8 else (torch.int8,)


def scales_of(kv: LayerKV) -> tuple[Tensor, Tensor]:
    """Scales of keys and of values, [N, K, S]; where the cache has none, tensors whose numbers are never read."""
    if kv.k_scale_NKS is None or kv.v_scale_NKS is None:
        return kv.k_NKDS, kv.v_NKSD
    return kv.k_scale_NKS, kv.v_scale_NKS


def power_of_2(n: int) -> int:
    """The least power of 2 that is not below ``n``."""
    return 1 << (n - 1).bit_length()


def warps(elements: int) -> int:
    """Warps of a program that works on so many elements at once: 16 per thread, 1 to 16 warps."""
    return min(16, max(1, elements // 512))
