"""What the largest step takes of memory and what a prompt takes of time, measured before an engine takes requests.

Refuses to decide what follows (``assemble.py``: the memory plan; ``disk_restore.py``: whether reading beats computing).
A GPU computes the largest step itself. A CPU would take seconds for it, so it computes two short ones and goes on in a
line from them, since activations grow with the tokens, and some of the logits, which come after them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch

from troth.cache.peak_memory import peak_bytes
from troth.contracts.cache_spec import CacheSpec
from troth.models.family import Model
from troth.run.lone_prompt import LonePrompt

SHORT_TOKENS: Final = (16, 64)
"""Of the steps that a CPU computes."""
MEASURED_LOGITS: Final = 16
"""Positions of which a CPU computes logits; those of more take as many times as much."""
GRAIN_BYTES: Final = 2**20
"""Measurements of a process differ by less than that from run to run; a plan should not."""

Peak = Callable[[torch.device, Callable[[], None]], int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What was measured."""

    transient_bytes: int | None
    """Most bytes that the largest step takes for a while; None: this system does not tell."""
    num_tokens: int
    """Of the longest step that was computed, all of one prompt."""
    seconds: float
    """It took."""

    def then(self, other: StepCost) -> StepCost:
        """What such a step costs if another model computes it, too, behind this one."""
        known = [cost for cost in (self.transient_bytes, other.transient_bytes) if cost is not None]
        return replace(
            self, transient_bytes=max(known) if len(known) == 2 else None, seconds=self.seconds + other.seconds
        )


class StepTrial:
    """Computes steps of one prompt over caches that are thrown away.

    Args:
        model: on ``device``.
        specs: its caches.
        max_samples: positions whose logits are wanted at once.
        kv_dtype: of keys and values.
        device: where the model is.
        peak: measures memory.
    """

    def __init__(
        self,
        model: Model,
        specs: tuple[CacheSpec, ...],
        *,
        max_samples: int,
        kv_dtype: torch.dtype,
        device: torch.device,
        peak: Peak = peak_bytes,
    ) -> None:
        self._model = model
        self._specs = specs
        self._max_samples = max_samples
        self._kv_dtype = kv_dtype
        self._device = device
        self._peak = peak

    @torch.inference_mode()
    def measure(self, step_tokens: int) -> StepCost:
        """What steps of at most ``step_tokens`` tokens cost.

        Raises:
            OutOfMemory: the device holds the weights, but no step.
        """
        if self._device.type == "cuda":
            bytes_, _ = self._measured(step_tokens, num_logits=self._max_samples)
            # Once more: the first time kernels were compiled.
            _, seconds = self._measured(step_tokens)
            return StepCost(transient_bytes=bytes_, num_tokens=step_tokens, seconds=seconds)
        short, long = (min(step_tokens, num_tokens) for num_tokens in SHORT_TOKENS)
        self._measured(short, num_logits=1)  # weights that lie in files are read now
        least, _ = self._measured(short)
        most, seconds = self._measured(long)
        num_logits = min(self._max_samples, MEASURED_LOGITS)
        of_logits, _ = self._measured(1, num_logits=num_logits)
        bytes_ = None
        if least is not None and most is not None and of_logits is not None:
            slope = max(0, most - least) / (long - short) if long > short else 0.0
            forward = max(least, most) + slope * (step_tokens - long)
            bytes_ = int(max(forward, of_logits * self._max_samples / num_logits))
            bytes_ = -(-bytes_ // GRAIN_BYTES) * GRAIN_BYTES
        return StepCost(transient_bytes=bytes_, num_tokens=long, seconds=seconds)

    def _measured(self, num_tokens: int, num_logits: int = 0) -> tuple[int | None, float]:
        """Bytes for a while and seconds of one step."""
        step, seconds = self._step(num_tokens, num_logits), 0.0

        def timed() -> None:
            nonlocal seconds
            started = time.perf_counter()
            step()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds = time.perf_counter() - started

        return self._peak(self._device, timed), seconds

    def _step(self, num_tokens: int, num_logits: int) -> Callable[[], None]:
        """A step of a prompt of so many tokens, with logits of so many positions."""
        prompt = LonePrompt(self._model, self._specs, [0] * num_tokens, kv_dtype=self._kv_dtype, device=self._device)
        for tensor in prompt.cache.tensors():
            tensor.zero_()  # what pages of a cache take is no part of what steps take

        def step() -> None:
            hidden_TD = prompt.hidden()
            if num_logits:
                # Scores before and after they are scaled and their noise, as a draw holds them.
                places_S = torch.arange(num_logits, device=self._device) % num_tokens
                logits_SV = self._model.logits(hidden_TD[places_S])
                _ = logits_SV + torch.rand_like(logits_SV)

        return step
