"""Every test here may use torch: activate the op providers once, and keep thread counts small."""

from __future__ import annotations

import torch

from troth.ops import registry

torch.set_num_threads(2)
registry.activate()
