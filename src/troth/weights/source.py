"""The one door through which models get their weights, and the proof that all of them were taken.

Owns shapes, presence and use of tensors. Refuses to know how they are stored: ``safetensors.py`` and
``gguf.py`` do, and both speak Hugging Face names. Legend: O outputs, I inputs, D width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fnmatch import translate
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from troth.artifact.artifact import Artifact
from troth.config.options import Inputs, Weights
from troth.errors import ModelLoadError
from troth.weights.fp8 import Fp8Tensor, is_rounded
from troth.weights.gguf import GgufStore
from troth.weights.quantized import QuantTensor
from troth.weights.rounded_inputs import rounds_inputs
from troth.weights.safetensors import SafetensorsStore

Progress = Callable[[int, int], None]
"""Called with (bytes handed out, bytes in all)."""


class StoredTensor(Protocol):
    """What a header says of one tensor."""

    @property
    def name(self) -> str:
        """As the file calls it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Row-major, in values."""

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""


class Store(Protocol):
    """The tensors of one artifact."""

    place: str
    """Path for messages."""
    norms_include_one: bool
    """Whether the norms of zero-centred families were stored as 1 + weight."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Hugging Face name -> tensor."""

    def read(self, name: str) -> Tensor | QuantTensor:
        """One of ``tensors``: dense, or quantised when it is a matrix. Raises ModelLoadError."""


class WeightSource:
    """Hands out the tensors of an artifact by their Hugging Face names and records which were taken.

    Tensors are views of the mapped files wherever the file holds what the model wants; do not write to
    them. They stay valid after this object is gone. ``shape`` is what the model expects; another one is an
    error that names both. ``weights`` says in what form matrices of layers are wanted, if not as they are stored, and
    ``inputs`` what those that are quantised round their inputs to, if to anything.

    Raises:
        ModelLoadError: from every method that hands out a tensor: it is missing, or not of the kind asked
        for.
    """

    def __init__(
        self,
        artifact: Artifact,
        progress: Progress | None = None,
        weights: Weights | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        self._store = _open(artifact)
        self._progress = progress
        self._weights = weights
        self._inputs = inputs
        self._used: set[str] = set()
        self._num_done_bytes = 0
        self.total_bytes = sum(tensor.num_bytes for tensor in self._store.tensors.values())

    def has(self, name: str) -> bool:
        """Whether the artifact holds a tensor of this name. Does not count as use."""
        return name in self._store.tensors

    def tensor(self, name: str, *, shape: tuple[int, ...] | None = None) -> Tensor:
        """A dense tensor in its stored dtype; float32 when it is stored quantised."""
        value = self._take(name, shape)
        return value.dequantize() if isinstance(value, QuantTensor) else value

    def optional_tensor(self, name: str, *, shape: tuple[int, ...] | None = None) -> Tensor | None:
        """As ``tensor``, or None when there is no such tensor."""
        return self.tensor(name, shape=shape) if self.has(name) else None

    def linear(self, name: str, *, shape: tuple[int, int] | None = None) -> Tensor | QuantTensor | Fp8Tensor:
        """A matrix (O, I) as stored: float [O, I] or quantised blocks; or one that is to be rounded."""
        value = self._take(name, shape)
        if isinstance(value, Tensor) and (value.dim() != 2 or not value.is_floating_point()):
            self._fail(name, f"is {value.dtype} of shape {tuple(value.shape)}, not a matrix of floats")
        if self._weights == "fp8" and is_rounded(name):
            if isinstance(value, QuantTensor):
                self._fail(name, f"is {value.ggml_type.name} already; leave out weights fp8")
            return Fp8Tensor(value)
        if self._inputs == "int8" and isinstance(value, QuantTensor) and rounds_inputs(name, value.ggml_type):
            return replace(value, inputs=torch.int8)
        return value

    def norm(self, name: str, *, zero_centred: bool = False, shape: tuple[int] | None = None) -> Tensor:
        """The scale of a norm, float32 [D].

        ``zero_centred`` says that the family computes with 1 + weight (Gemma, Qwen3.5): what comes back
        includes the 1, whether the file stored weight (safetensors) or 1 + weight (GGUF).
        """
        value = self._take(name, shape)
        if isinstance(value, QuantTensor) or value.dim() != 1 or not value.is_floating_point():
            self._fail(name, f"of shape {tuple(value.shape)} is not a vector of floats")
        scale = value.float()
        return scale + 1.0 if zero_centred and not self._store.norms_include_one else scale

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Prove that every tensor was taken, but those whose name matches an ``ignored`` pattern (``mtp.*``).

        Patterns are shell-style and case-sensitive, and match a tensor's Hugging Face name or its name in
        the file.

        Raises:
            ModelLoadError: tensors are left over; the model would compute without them.
        """
        pattern = re.compile("|".join(translate(glob) for glob in ignored) or r"(?!)")
        unused = [
            tensor.name
            for name, tensor in self._store.tensors.items()
            if name not in self._used and not pattern.match(name) and not pattern.match(tensor.name)
        ]
        if unused:
            shown = ", ".join(sorted(unused)[:8]) + (", ..." if len(unused) > 8 else "")
            message = f"{len(unused)} tensors have no place in this model: {shown}"
            raise ModelLoadError(message, path=self._store.place)
        if self._progress is not None:
            self._progress(self.total_bytes, self.total_bytes)

    def _take(self, name: str, shape: tuple[int, ...] | None) -> Tensor | QuantTensor:
        stored = self._store.tensors.get(name)
        if stored is None:
            self._fail(name, "the model needs this tensor, but it is not there")
        if shape is not None and stored.shape != shape:
            self._fail(name, f"has shape {stored.shape}, but the config makes it {shape}")
        value = self._store.read(name)
        if name not in self._used:
            self._used.add(name)
            self._num_done_bytes += stored.num_bytes
            if self._progress is not None:
                self._progress(self._num_done_bytes, self.total_bytes)
        return value

    def _fail(self, name: str, message: str) -> NoReturn:
        raise ModelLoadError(message, path=self._store.place, field=name)


def _open(artifact: Artifact) -> Store:
    if artifact.gguf is not None:
        return GgufStore(artifact.gguf)
    assert artifact.safetensors is not None, artifact.kind
    return SafetensorsStore(artifact.safetensors)
