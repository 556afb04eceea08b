"""How flags and environment variables become options."""

from __future__ import annotations

from pathlib import Path

import pytest

from troth.cli import flags
from troth.cli.main import build_parser
from troth.config import env, values
from troth.config.folders import disk_cache_folder
from troth.config.options import EngineOptions, ModelOptions, ServeOptions
from troth.errors import OptionError


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def test_variables_are_the_pinned_ones() -> None:
    """An environment variable is a promise like a flag, and harder to see."""
    assert [variable.name for variable in env.VARIABLES] == [
        "TROTH_MODEL",
        "TROTH_DEVICE",
        "TROTH_THREADS",
        "TROTH_HOST",
        "TROTH_PORT",
        "TROTH_API_KEY",
    ]
    assert len(env.VARIABLES) <= 8


def test_variables_set_fields_that_exist() -> None:
    options = {field for cls in (ModelOptions, EngineOptions, ServeOptions) for field in cls.__dataclass_fields__}
    assert {variable.field for variable in env.VARIABLES} <= options


def test_options_are_the_defaults_when_nothing_is_said() -> None:
    args = build_parser().parse_args(["serve"])
    assert flags.model_options(args) == ModelOptions()
    assert flags.engine_options(args) == EngineOptions()
    assert flags.serve_options(args) == ServeOptions()


def test_options_take_every_serve_flag() -> None:
    line = (
        "serve -m dir --context 100 --device cpu --dtype bfloat16 --kv-dtype float16 --threads 2 --providers torch,cpu "
        "--chat-template t.jinja --rows 3 --chunk-tokens 64 --kv-memory 1.5G --host ::1 --port 0 --name n --alias a=n "
        "--alias b=n --api-key k --api-key l --cors-origin http://x --queue 0 --max-streams 5 --keepalive 2.5 "
        "--request-timeout 60 --disk-cache d --disk-cache-size 2G"
    )
    args = build_parser().parse_args(line.split())
    assert flags.model_options(args) == ModelOptions(
        model="dir",
        name="n",
        device="cpu",
        dtype="bfloat16",
        kv_dtype="float16",
        context_tokens=100,
        chat_template="t.jinja",
    )
    assert flags.engine_options(args) == EngineOptions(
        max_rows=3,
        max_waiting=0,
        chunk_tokens=64,
        kv_memory_bytes=3 * 2**29,
        threads=2,
        providers=("torch", "cpu"),
        disk_cache="d",
        disk_cache_bytes=2 * 2**30,
    )
    assert flags.serve_options(args) == ServeOptions(
        host="::1",
        port=0,
        api_keys=("k", "l"),
        cors_origins=("http://x",),
        max_streams=5,
        keepalive_s=2.5,
        request_timeout_s=60.0,
        model_aliases=(("a", "n"), ("b", "n")),
    )


def test_engine_options_refuse_a_draft_model_that_nobody_asks_to_draft() -> None:
    parse = build_parser().parse_args
    with pytest.raises(OptionError, match="'small' would be loaded and draft nothing; say --speculate draft"):
        flags.engine_options(parse(["serve", "--draft-model", "small", "--speculate", "ngram"]))
    with pytest.raises(OptionError, match="--speculate draft needs a second model that drafts; name one with --draft"):
        flags.engine_options(parse(["serve", "--speculate", "draft"]))
    assert flags.engine_options(parse(["serve", "--speculate", "off"])).speculation == ("off",)
    for wrong in ("foo", "external", "off"):
        with pytest.raises(
            OptionError, match=f"--speculate must name some of ngram, grammar, mtp, draft, not '{wrong}'"
        ):
            flags.engine_options(parse(["serve", "--speculate", f"ngram,{wrong}"]))
    kept = flags.engine_options(parse(["serve", "--draft-model", "small", "--speculate", "ngram,draft"]))
    assert kept.draft_model == "small"


def test_engine_options_let_a_flag_win_over_a_preset() -> None:
    assert flags.engine_options(build_parser().parse_args(["serve"]), max_rows=1).max_rows == 1
    assert flags.engine_options(build_parser().parse_args(["serve", "--rows", "4"]), max_rows=1).max_rows == 4


def test_options_take_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "TROTH_MODEL": "m.gguf",
        "TROTH_DEVICE": "cuda:1",
        "TROTH_THREADS": "3",
        "TROTH_HOST": "0.0.0.0",
        "TROTH_PORT": "99",
        "TROTH_API_KEY": "a, b",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    args = build_parser().parse_args(["serve"])
    assert flags.model_options(args) == ModelOptions(model="m.gguf", device="cuda:1")
    assert flags.engine_options(args) == EngineOptions(threads=3)
    assert flags.serve_options(args) == ServeOptions(host="0.0.0.0", port=99, api_keys=("a", "b"))


def test_options_let_a_flag_win_over_a_variable_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROTH_PORT", "tcp://10.0.0.1:8080")
    args = build_parser().parse_args(["serve", "--port", "81"])
    assert flags.serve_options(args).port == 81


def test_options_raise_on_a_variable_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROTH_PORT", "tcp://10.0.0.1:8080")
    with pytest.raises(OptionError, match=r"TROTH_PORT must be .* not 'tcp://10.0.0.1:8080'; correct it or unset it"):
        flags.serve_options(build_parser().parse_args(["serve"]))


def test_options_leave_variables_of_other_commands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROTH_PORT", "tcp://10.0.0.1:8080")
    assert flags.model_options(build_parser().parse_args(["run", "Hi"])) == ModelOptions()


def test_variable_that_is_secret_is_not_repeated_in_an_error() -> None:
    (variable,) = (variable for variable in env.VARIABLES if variable.secret)
    with pytest.raises(OptionError, match="TROTH_API_KEY cannot be read") as caught:
        variable.value({"TROTH_API_KEY": "hunter2,,"})
    assert "hunter2" not in str(caught.value)


def test_variable_that_is_empty_counts_as_unset() -> None:
    assert env.defaults(["model", "port"], {"TROTH_MODEL": "", "TROTH_PORT": ""}) == {}


def test_unknown_variables_are_those_with_our_prefix() -> None:
    assert env.unknown({"TROTH_PROT": "1", "TROTH_PORT": "2", "HOME": "/"}) == ("TROTH_PROT",)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("512M", 512 * 2**20), ("4g", 4 * 2**30), ("1.5 GiB", 3 * 2**29), ("2kb", 2048), ("1T", 2**40)],
)
def test_size_bytes_reads_binary_units(text: str, size: int) -> None:
    assert values.size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "G", "1P", "1e3", "1 2", "0.2", "inf"])
def test_size_bytes_refuses_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="must be a size such as"):
        values.size_bytes(text)


@pytest.mark.parametrize(
    "text", ["*", "null", "http://localhost:3000", "https://a.example", "chrome-extension://abc", "file://"]
)
def test_origin_takes_what_browsers_send(text: str) -> None:
    assert values.origin(text) == text


def test_origin_is_compared_as_browsers_spell_it() -> None:
    assert values.origin("HTTP://LocalHost:3000") == "http://localhost:3000"
    assert values.origin("http://[::1]:8080") == "http://[::1]:8080"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost:3000",
        "http://a.example/",
        "http://a.example/x",
        "http://",
        "a b",
        "http://*.example",
        "http://me:word@a.example",
        "http://a:99999",
        "http://a:",
    ],
)
def test_origin_refuses_what_no_browser_sends(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be an origin such as http://localhost:3000 .* not"):
        values.origin(text)


@pytest.mark.parametrize("text", ["", "1_0", "+1", " 1", "1.0", "²", "٣", "--1", "0x1", "11", "-1"])
def test_whole_number_takes_plain_digits_in_its_range_only(text: str) -> None:
    with pytest.raises(ValueError, match="must be a whole number from 0 to 10"):
        values.whole_number(0, 10)(text)
    assert values.whole_number(0, 10)("10") == 10


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"XDG_CACHE_HOME": "/c"}, "/c/troth/prompt-cache"),
        ({"XDG_CACHE_HOME": "relative"}, "~/.cache/troth/prompt-cache"),
        ({}, "~/.cache/troth/prompt-cache"),
    ],
)
def test_disk_cache_folder_is_the_users_own(environ: dict[str, str], folder: str) -> None:
    assert str(disk_cache_folder(environ)) == str(Path(folder).expanduser())
