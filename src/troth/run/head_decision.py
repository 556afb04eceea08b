"""Whether a model's draft head is loaded: it is asked for, it is there, and a certificate speaks for it.

Refuses to prove anything (``certification.py``) and to load (``assemble.py``). Next: ``certificate.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from troth.artifact.artifact import Artifact
from troth.config.options import EngineOptions
from troth.errors import CapabilityUnavailable, ModelLoadError
from troth.models.registry import Recognised
from troth.run.certificate import Computation, certificate_path, read_certificate

NOT_ASKED_FOR: Final = (
    "this engine was started without its draft head; name mtp in the engine's option speculation "
    "(troth serve --speculate mtp)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadDecision:
    """About one load."""

    refusal: str | None
    """Why the head is not loaded; None: it is."""
    uncertified: bool = False
    """Whether that is against the rule, because somebody asked for it."""


WITHOUT_HEAD: Final = HeadDecision(refusal=NOT_ASKED_FOR)


def decide_head(
    recognised: Recognised, engine: EngineOptions, computation: Callable[[], Computation], folder: Path | None
) -> HeadDecision:
    """Decide. Reads the model's files where a certificate was made of a copy of them.

    Args:
        recognised: the model.
        engine: ``speculation`` asks for the head by naming mtp.
        computation: how it is going to be computed; called when that matters.
        folder: where certificates lie; None: nowhere.

    Raises:
        CapabilityUnavailable: the options ask for it, and it cannot be had.
        ModelLoadError: a file changed since the artifact was resolved.
    """
    absent = recognised.draft_head_refusal
    if "mtp" not in engine.speculation:
        return HeadDecision(refusal=absent or NOT_ASKED_FOR)
    if absent is not None:
        raise CapabilityUnavailable("speculation mtp", absent, param="speculation")
    refusal = certificate_refusal(recognised, computation(), folder)
    if refusal is None or engine.speculate_uncertified:
        return HeadDecision(refusal=None, uncertified=refusal is not None)
    raise CapabilityUnavailable(
        "speculation mtp",
        f"{refusal}; run troth certify {_place(recognised.artifact)} with the same options, or load it all the same "
        "with speculate_uncertified (--speculate-uncertified)",
        param="speculation",
    )


def _place(artifact: Artifact) -> Path:
    return artifact.root if artifact.gguf is None else artifact.files[0].path


def certificate_refusal(recognised: Recognised, computation: Computation, folder: Path | None) -> str | None:
    """Why no certificate speaks for a load; None: one does. Raises ModelLoadError when a file has changed."""
    if folder is None:
        return "its draft head has no certificate: there is no folder for them on this machine"
    path = certificate_path(folder, recognised.artifact, computation)
    try:
        certificate = read_certificate(path)
    except ModelLoadError as error:
        return f"its certificate cannot be read: {error}"
    if certificate is None:
        return (
            f"its draft head has no certificate for {computation.device} in {computation.dtype} "
            f"with a cache in {computation.kv_dtype}"
        )
    return certificate.refusal(recognised.artifact, computation)
