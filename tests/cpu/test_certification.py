"""``troth certify``: what proves a draft head, what a certificate binds, and what is loaded without one."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import troth
from tests.cpu.draft_heads import VOCAB, load_with_head, save_with_head
from troth.artifact.resolve import resolve
from troth.config.facts import MachineFacts
from troth.config.options import EngineOptions, ModelOptions
from troth.contracts.cache_spec import attention_groups
from troth.contracts.progress import no_progress
from troth.errors import CapabilityUnavailable, ModelLoadError, OptionError
from troth.models.family import Placement
from troth.models.registry import recognise
from troth.nn.draft_head import DraftHead, LastPairs
from troth.nn.gated_attention import GatedAttention
from troth.run.certificate import Certificate, Computation, certificate_path, implementation, read_certificate
from troth.run.certification import Findings, certify_head
from troth.run.head_decision import HeadDecision, decide_head
from troth.run.planned import Planned, namespace_of, plan_model
from troth.testing.byte_tokenizer import ByteTokenizer

FACTS = MachineFacts(num_cores=1, total_bytes=8 * 2**30, available_bytes=4 * 2**30, gpus=())
MTP = EngineOptions(speculation=("mtp",), max_rows=4)


@pytest.fixture(scope="module", name="folder")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_head(tmp_path_factory.mktemp("head"))


def planned(folder: Path, kv_dtype: str = "float32") -> Planned:
    model = ModelOptions(model=str(folder), kv_dtype=kv_dtype)  # type: ignore[arg-type]
    return plan_model(resolve(folder), model, MTP, FACTS, HeadDecision(refusal=None))


def prompts(*lengths: int) -> list[list[int]]:
    return [
        torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        for length in lengths
    ]


def proved(folder: Path, **kwargs: Any) -> Findings:
    return certify_head(planned(folder, **kwargs), ByteTokenizer(), prompts(20, 35), no_progress)


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_certification_proves_a_head_that_is_right(folder: Path, kv_dtype: str) -> None:
    findings = proved(folder, kv_dtype=kv_dtype)
    assert findings.problems == []
    assert findings.num_compared > 60
    assert findings.num_cached_tokens > 0
    assert findings.num_accepted > 0


def _without_hidden_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    init = DraftHead.__init__

    def built(self: DraftHead, **parts: Any) -> None:
        init(self, **parts | {"hidden_norm_D": torch.ones_like(parts["hidden_norm_D"])})

    monkeypatch.setattr(DraftHead, "__init__", built)


def _blind_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    look_back = GatedAttention.look_back

    def looked(self: GatedAttention, x: Tensor, pairs: LastPairs, cache: Any) -> Tensor:
        return look_back(self, x, replace(pairs, own_slots_R=pairs.slots_T), cache)

    monkeypatch.setattr(GatedAttention, "look_back", looked)


@pytest.mark.parametrize("damage", [_without_hidden_norm, _blind_to_itself])
def test_certification_finds_a_head_that_is_wrong(
    folder: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[pytest.MonkeyPatch], None]
) -> None:
    damage(monkeypatch)
    problems = proved(folder).problems
    assert problems
    assert all("computed plainly" in problem for problem in problems), "a head never changes an answer"


def computation(**changes: Any) -> Computation:
    values: dict[str, Any] = {
        "implementation": implementation(),
        "device": "cpu",
        "dtype": "float32",
        "kv_dtype": "float16",
        "providers": ("cpu", "torch"),
    }
    return Computation(**values | changes)


def certified(folder: Path, place: Path, **changes: Any) -> Path:
    """Write a certificate of the model in ``folder``, as if it had been proved."""
    artifact = resolve(folder)
    values: dict[str, Any] = {
        "model": artifact.name,
        "version": troth.__version__,
        "digest": artifact.digest(),
        "fingerprint": artifact.fingerprint(),
        "computation": computation(),
    }
    path = certificate_path(place, artifact, computation())
    Certificate(**values | changes).write(path)
    return path


def decide(folder: Path, place: Path | None, engine: EngineOptions = MTP, **changes: Any) -> HeadDecision:
    return decide_head(recognise(resolve(folder)), engine, lambda: computation(**changes), place)


def test_a_head_with_a_certificate_is_loaded(folder: Path, tmp_path: Path) -> None:
    path = certified(folder, tmp_path)
    assert decide(folder, tmp_path) == HeadDecision(refusal=None)
    found = read_certificate(path)
    assert found is not None
    assert found.computation == computation()


def test_a_head_is_loaded_when_it_is_asked_for_alone(folder: Path, tmp_path: Path) -> None:
    certified(folder, tmp_path)
    decision = decide(folder, tmp_path, EngineOptions(speculation=("ngram",)))
    assert decision.refusal is not None
    assert "started without its draft head" in decision.refusal
    recognised = recognise(resolve(folder))
    assert recognised.config.cache_specs(4) != recognised.with_draft_head().config.cache_specs(4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"implementation": "0" * 64}, "for another implementation"),
        ({"providers": ("torch",)}, "for another providers"),
        ({"dtype": "bfloat16"}, "has no certificate"),
        ({"kv_dtype": "int8"}, "has no certificate"),
        ({"device": "a GPU"}, "has no certificate"),
    ],
)
def test_a_head_computed_otherwise_than_certified_is_refused_with_the_reason(
    folder: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    certified(folder, tmp_path)
    with pytest.raises(CapabilityUnavailable, match=reason) as refused:
        decide(folder, tmp_path, **changes)
    assert (refused.value.code, refused.value.param) == ("capability_unavailable", "speculation")
    assert "troth certify" in str(refused.value)
    forced = replace(MTP, speculate_uncertified=True)
    assert decide(folder, tmp_path, forced, **changes) == HeadDecision(refusal=None, uncertified=True)


def test_a_copy_of_the_files_is_read_and_other_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    certified(folder, tmp_path / "certificates")
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert decide(copy, tmp_path / "certificates") == HeadDecision(refusal=None)
    weights = copy / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(CapabilityUnavailable, match="for other files"):
        decide(copy, tmp_path / "certificates")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 0}', '{"format": 1, "model": 3}'])
def test_a_damaged_certificate_is_refused_with_its_place(folder: Path, tmp_path: Path, text: str) -> None:
    path = certified(folder, tmp_path)
    path.write_text(text)
    with pytest.raises(ModelLoadError, match=path.name):
        read_certificate(path)
    with pytest.raises(CapabilityUnavailable, match="cannot be read"):
        decide(folder, tmp_path)


def test_a_certificate_that_cannot_be_written_says_why_and_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk left its beginning behind, and no place was named."""
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="json: the certificate cannot be written: Not a directory"):
        certified(folder, tmp_path / "file" / "certificates")

    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OptionError, match="cannot be written: No space left"):
        certified(folder, tmp_path / "certificates")
    assert list((tmp_path / "certificates").iterdir()) == []


def test_a_model_without_a_head_says_so(tmp_path: Path, folder: Path) -> None:
    shutil.copytree(folder, tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 0}))
    with pytest.raises(CapabilityUnavailable, match="the checkpoint has no draft head"):
        decide(tmp_path / "plain", tmp_path, replace(MTP, speculate_uncertified=True))


def test_a_head_takes_a_layer_of_the_cache_and_a_share_of_the_rows(folder: Path) -> None:
    without, with_head = plan_model(resolve(folder), ModelOptions(), MTP, FACTS), planned(folder, "float16")
    plain, headed = (attention_groups(one.specs)[0] for one in (without, with_head))
    assert headed.layers == (*plain.layers, 3)
    assert headed.bytes_per_block == 2 * plain.bytes_per_block + 4 * 64
    assert with_head.plan.state_bytes - without.plan.state_bytes == 4 * headed.head_bytes > 0
    assert namespace_of(with_head, "a", ["cpu"]) != namespace_of(without, "a", ["cpu"])


def test_draft_tensors_are_loaded_whole_or_not_at_all(folder: Path, tmp_path: Path) -> None:
    place = Placement(device=torch.device("cpu"), dtype=torch.float32, context_tokens=64)
    assert recognise(resolve(folder)).load(place).draft_head is None
    assert load_with_head(folder).draft_head is not None
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    for name, (tensors, message) in {
        "missing": ({key: value for key, value in stored.items() if key != "mtp.fc.weight"}, "mtp.fc.weight"),
        "unknown": (stored | {"mtp.layers.1.norm.weight": torch.zeros(3)}, "no place in this model"),
    }.items():
        shutil.copytree(folder, tmp_path / name)
        safetensors.torch.save_file(tensors, tmp_path / name / "model.safetensors")
        with pytest.raises(ModelLoadError, match=message):
            load_with_head(tmp_path / name)
        assert recognise(resolve(tmp_path / name)).load(place).draft_head is None
