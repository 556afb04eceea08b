"""Which family file serves which ``model_type`` or GGUF architecture, and how an artifact becomes a model."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Final

from troth.artifact.artifact import Artifact
from troth.config.families import FAMILIES, GGUF_FAMILIES
from troth.errors import ModelLoadError
from troth.models.family import FamilyConfig, HeadConfig, Model, Placement
from troth.weights.source import Progress, WeightSource

DRAFT_TENSORS: Final = ("mtp.*",)
"""Patterns of the tensors of draft heads, where they are ignored."""


@dataclass(frozen=True, slots=True)
class Recognised:
    """An artifact whose family is known and whose config was read. Nothing is loaded yet."""

    artifact: Artifact
    family: str
    config: FamilyConfig
    module: ModuleType

    def load(self, place: Placement, progress: Progress | None = None) -> Model:
        """Build the model; every tensor of the artifact is used or ignored on purpose.

        Raises:
            ModelLoadError: a tensor is missing, left over or has another shape.
        """
        source = WeightSource(self.artifact, progress, place.weights, place.inputs)
        model: Model = self.module.Model(self.config, source, place)
        # A head that is loaded is loaded whole.
        left = [pattern for pattern in self.module.IGNORED if model.draft_head is None or pattern not in DRAFT_TENSORS]
        source.finish(left)
        return model

    @property
    def draft_head_refusal(self) -> str | None:
        """Why the model cannot draft for itself; None: it has a head for that which can be loaded."""
        if not isinstance(self.config, HeadConfig):
            return "its family has no draft heads"
        return self.config.draft_head_refusal

    def with_draft_head(self) -> Recognised:
        """The same with its draft head, which ``load`` then loads; there is one."""
        assert isinstance(self.config, HeadConfig), f"{self.family}: {self.draft_head_refusal}"
        assert self.draft_head_refusal is None, self.draft_head_refusal
        return replace(self, config=self.config.with_draft_head())


def recognise(artifact: Artifact) -> Recognised:
    """Find the family of an artifact and read its config.

    Raises:
        ModelLoadError: no family here computes this architecture, or its config has what the family does not know.
    """
    if artifact.gguf is not None:
        metadata = artifact.gguf.metadata
        name = str(metadata.get("general.architecture", ""))
        module = _module(name, GGUF_FAMILIES, str(artifact.gguf.path), "general.architecture")
        prefix = f"{name}."
        values: dict[str, Any] = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
        tokens = metadata.get("tokenizer.ggml.tokens")
        if "vocab_size" not in values and isinstance(tokens, list):
            values["vocab_size"] = len(tokens)
        return Recognised(artifact, name, module.Config.from_gguf(values, str(artifact.gguf.path)), module)
    path = str(artifact.root / "config.json")
    name = str(artifact.config.get("model_type", ""))
    module = _module(name, FAMILIES, path, "model_type")
    return Recognised(artifact, name, module.Config.from_hf(artifact.config, path), module)


def _module(name: str, table: Mapping[str, str], path: str, field: str) -> ModuleType:
    if name not in table:
        known = ", ".join(sorted(table))
        raise ModelLoadError(
            f"{name!r} is not an architecture Troth computes; it computes {known}", path=path, field=field
        )
    return importlib.import_module(f"troth.models.{table[name]}")
