"""``troth fit``: the plan as people and programs read it, and the nearest one when it does not fit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from troth import compose
from troth.cli.main import main
from troth.cli.quantity import bytes_text, count_text, rate_text
from troth.cli.table import table
from troth.config.disk_quota import QUOTA_BYTES, plan_disk_cache
from troth.config.folders import disk_cache_folder
from troth.config.nearest_plan import nearest_plan
from troth.config.options import EngineOptions, ModelOptions
from troth.contracts.cache_spec import AttentionSpec, RecurrentSpec, StateTensor
from troth.contracts.counted import counted
from troth.contracts.memory_plan import DiskCachePlan, MemoryPlan
from troth.errors import OptionError
from troth.schedule.sizing import Demand, plan_memory

ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}


class Planner:
    """Plans of a model of one size on a machine of another."""

    def __init__(
        self,
        *,
        usable_bytes: int,
        num_parameters: int = 2**20,
        transient_bytes: int = 0,
        disk_cache: DiskCachePlan | None = None,
    ) -> None:
        self.disk_cache = disk_cache
        self.usable_bytes = usable_bytes
        self.num_parameters = num_parameters
        self.transient_bytes = transient_bytes
        self.asked: list[tuple[ModelOptions, EngineOptions]] = []

    def __call__(self, model: ModelOptions, engine: EngineOptions) -> MemoryPlan:
        self.asked.append((model, engine))
        dtype = model.dtype or "float32"
        element_bytes = ELEMENT[model.kv_dtype or dtype]
        return plan_memory(
            Demand(
                device="cpu",
                dtype=dtype,
                specs=(
                    AttentionSpec(
                        layers=(0, 2), num_kv_heads=1, head_dim=16, value_dim=16, element_bytes=element_bytes
                    ),
                    RecurrentSpec(layers=(1,), tensors=(StateTensor((2**16,), 4),)),
                ),
                weights_bytes=self.num_parameters * ELEMENT[dtype],
                transient_bytes=self.transient_bytes,
                reserve_bytes=2**20,
                usable_bytes=self.usable_bytes,
                declared_context_tokens=4096,
                wanted_context_tokens=model.context_tokens,
                max_rows=engine.max_rows or 8,
                step_tokens=256,
                kv_memory_bytes=engine.kv_memory_bytes,
            )
        )


def fit(monkeypatch: pytest.MonkeyPatch, planner: Planner, *arguments: str) -> int:
    def plan(artifact: Any, model: ModelOptions, engine: EngineOptions) -> Any:
        memory = planner(model, engine)
        memory = replace(
            memory, disk_cache=planner.disk_cache, decisions=("device cpu: no GPU is present", *memory.decisions)
        )
        return SimpleNamespace(plan=memory, name="pebble", recognised=SimpleNamespace(family="llama"))

    monkeypatch.setattr(compose, "find", lambda options: options.model)
    monkeypatch.setattr(compose, "plan", plan)
    return main(["fit", *arguments])


def test_fit_shows_where_the_memory_goes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(monkeypatch, Planner(usable_bytes=2**26, transient_bytes=3 * 2**19)) == 0
    assert capsys.readouterr().out == (
        "pebble: llama on cpu, computing in float32\n"
        "\n"
        "weights                              4.0 MiB\n"
        "KV cache, full attention, 2 layers   8.0 MiB  2,048 blocks of 4.0 KiB\n"
        "recurrent state                      2.0 MiB  8 rows\n"
        "checkpoints                          6.8 MiB  27 states to come back to\n"
        "workspace                            1.5 MiB  activations of one step\n"
        "reserve                              1.0 MiB  left free\n"
        "-----------------------------------------------------------------------\n"
        "total                               23.2 MiB\n"
        "usable                              64.0 MiB  free now, less a tenth\n"
        "\n"
        "prompt cache in memory  14.8 MiB  what requests leave of cache and checkpoints\n"
        "prompt cache on disk         off\n"
        "\n"
        "- device cpu: no GPU is present\n"
        "- 27 checkpoints of 262144 bytes: recurrent states kept for later requests\n"
        "- 8 rows of 4096 tokens: all fit\n"
        "\n"
        "It fits: 8 rows, context 4,096 of 4,096 tokens.\n"
    )


def test_fit_shows_what_the_prompt_cache_may_take_of_the_disk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = DiskCachePlan(folder="/cache", quota_bytes=3 * 2**30, used_bytes=2**30, free_bytes=2**30)
    planner = Planner(usable_bytes=2**26, disk_cache=disk)
    assert fit(monkeypatch, planner) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "prompt cache on disk     3.0 GiB  1.0 GiB used, 1.0 GiB free on the disk of /cache" in lines
    assert "The disk has not so much room; lower --disk-cache-size, or free some." in lines
    assert planner.asked[-1][1].disk_cache == str(disk_cache_folder()), "as troth serve would have it"
    assert fit(monkeypatch, planner, "--disk-cache", "off", "--json") == 0
    assert json.loads(capsys.readouterr().out)["disk_cache"]["quota_bytes"] == 3 * 2**30
    assert planner.asked[-1][1].disk_cache == "off"


def test_plan_of_a_disk_cache_counts_what_it_holds_and_makes_nothing(tmp_path: Path) -> None:
    missing = tmp_path / "not" / "there"
    plan = plan_disk_cache(missing, None)
    assert not missing.exists()
    assert (plan.used_bytes, plan.folder) == (0, str(missing))
    assert 0 < plan.quota_bytes == min(QUOTA_BYTES, plan.free_bytes // 10)
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "abc.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "index.sqlite").write_bytes(b"x" * 5000)
    plan = plan_disk_cache(tmp_path, 500)
    assert (plan.used_bytes, plan.quota_bytes, plan.fits) == (1000, 500, True)


def test_fit_names_the_nearest_plan_and_fails_when_it_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(monkeypatch, Planner(usable_bytes=6 * 2**20)) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "It does not fit: 7.0 MiB wanted, 6.0 MiB usable.",
        "It would fit with --rows 2: 5.8 MiB, 2 rows, context 1,024 of 4,096 tokens.",
    ]


def test_fit_says_so_when_nothing_helps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(monkeypatch, Planner(usable_bytes=2**20)) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "Nothing this command can change makes it fit. Free memory, or take a smaller model."


def test_fit_json_holds_the_plan_and_the_nearest_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(monkeypatch, Planner(usable_bytes=6 * 2**20), "--json", "some/model") == 1
    value = json.loads(capsys.readouterr().out)
    assert (value["model"], value["family"], value["fits"], value["weights_bytes"]) == ("pebble", "llama", False, 2**22)
    assert value["groups"][0]["name"] == "full attention, 2 layers"
    assert value["decisions"][0] == "device cpu: no GPU is present"
    assert value["nearest"]["flags"] == "--rows 2"
    assert value["nearest"]["fits"] is True
    assert fit(monkeypatch, Planner(usable_bytes=2**26), "--json") == 0
    assert json.loads(capsys.readouterr().out)["nearest"] is None


def test_fit_hands_the_flags_on(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(usable_bytes=2**26)
    assert fit(monkeypatch, planner, "some/model", "--context", "128", "--rows", "2", "--kv-memory", "1M") == 0
    ((model, engine),) = planner.asked
    assert (model.model, model.context_tokens, engine.max_rows, engine.kv_memory_bytes) == ("some/model", 128, 2, 2**20)


def nearest(planner: Planner, model: ModelOptions, engine: EngineOptions) -> tuple[str, MemoryPlan] | None:
    found = nearest_plan(planner, planner(model, engine), model, engine)
    return (str(found[0]), found[1]) if found else None


@pytest.mark.parametrize(
    ("usable_mib", "model", "engine", "flags"),
    [
        # 4 MiB weights, 1 reserve, 2 state, 8 of cache in float32
        (13, ModelOptions(), EngineOptions(kv_memory_bytes=2**23), "--kv-dtype bfloat16"),
        (12, ModelOptions(kv_dtype="float16"), EngineOptions(kv_memory_bytes=2**40, max_rows=32), "--rows 8"),
        (
            12,
            ModelOptions(kv_dtype="float16"),
            EngineOptions(kv_memory_bytes=2**40, max_rows=16),
            "(without --kv-memory)",
        ),
        (6, ModelOptions(), EngineOptions(), "--rows 2"),
        (5, ModelOptions(), EngineOptions(max_rows=1), "--dtype bfloat16"),
        (4, ModelOptions(), EngineOptions(), "--kv-dtype bfloat16 --rows 1 --dtype bfloat16"),
    ],
)
def test_nearest_plan_changes_as_little_as_it_can(
    usable_mib: int, model: ModelOptions, engine: EngineOptions, flags: str
) -> None:
    planner = Planner(usable_bytes=usable_mib * 2**20)
    assert not planner(model, engine).fits
    found = nearest(planner, model, engine)
    assert found is not None
    assert found[0] == flags
    assert found[1].fits


def test_nearest_plan_halves_the_context_when_that_is_what_is_too_large() -> None:
    """A context of which one half is affordable and the whole is not, as with a cache size that is fixed."""

    def plan_with(model: ModelOptions, engine: EngineOptions) -> MemoryPlan:
        plan = Planner(usable_bytes=2**26)(ModelOptions(), EngineOptions())
        return replace(plan, reserve_bytes=2**16 * (model.context_tokens or 4096))

    unfit = plan_with(ModelOptions(), EngineOptions())
    found = nearest_plan(plan_with, unfit, ModelOptions(kv_dtype="bfloat16"), EngineOptions())
    assert found is not None
    assert str(found[0]) == "--context 512"
    assert found[1].fits


def test_nearest_plan_passes_over_what_cannot_be_planned() -> None:
    planner = Planner(usable_bytes=6 * 2**20)
    unfit = planner(ModelOptions(), EngineOptions())

    def plan_with(model: ModelOptions, engine: EngineOptions) -> MemoryPlan:
        if model.kv_dtype is not None or engine.max_rows is None:
            raise OptionError("not this one")
        return planner(model, engine)

    found = nearest_plan(plan_with, unfit, ModelOptions(), EngineOptions())
    assert found is not None
    assert str(found[0]) == "--rows 2"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (102_400, "100 KiB"),
        (98_362_432, "93.8 MiB"),
        (1023 * 2**20, "1.0 GiB"),
        (5 * 2**40, "5.0 TiB"),
        (2**52, "4096 TiB"),
    ],
)
def test_bytes_text_has_three_digits_and_a_unit(num_bytes: int, text: str) -> None:
    assert bytes_text(num_bytes) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(7, "7"), (999, "999"), (1000, "1.00K"), (134_515_008, "135M"), (8_030_261_248, "8.03B"), (999_600_000, "1.00B")],
)
def test_count_text_reads_as_the_field_says_it(number: int, text: str) -> None:
    assert count_text(number) == text


def test_counted_agrees_with_its_number() -> None:
    assert (counted(1, "row"), counted(0, "row")) == ("1 row", "0 rows")
    assert counted(2048, "block", spec=",") == "2,048 blocks"
    assert (counted(1, "prefix", "prefixes"), counted(2, "prefix", "prefixes")) == ("1 prefix", "2 prefixes")


def test_fit_speaks_of_one_thing_in_the_singular(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(monkeypatch, Planner(usable_bytes=2**26), "--rows", "1") == 0
    out = capsys.readouterr().out
    assert "- 1 row of 4096 tokens: all fit\n" in out
    assert "It fits: 1 row, context" in out
    assert re.search(r"(?<![\d,.])1 (rows|blocks|layers|checkpoints|states)\b", out) is None


def test_rate_text_has_a_dash_where_nothing_was_measured() -> None:
    assert (rate_text(10, 4.0), rate_text(10, 0.0), rate_text(0, 1.0)) == ("2.5 tok/s", "-", "-")


def test_table_lines_columns_up_and_cuts_nothing() -> None:
    assert table([("a", "bb", "c"), ("long", "2", "")], right=[1], header=True) == [
        "a     bb  c",
        "----  --  -",
        "long   2",
    ]
    assert table([]) == []
