"""An engine in a process of its own: what its client sees of loading, streams, crashes and the end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from troth.contracts.events import Completed, Event, Failed, Prefill, Segment
from troth.contracts.names import RequestId
from troth.contracts.request import Request
from troth.errors import DeviceError, ModelLoadError, NotReady, OptionError, StreamProtocol, TrothError
from troth.runtime import wire
from troth.runtime.child import cause_of
from troth.runtime.isolate import ProcessEngineClient, RestartPolicy
from troth.testing.byte_tokenizer import EOS_ID
from troth.testing.fake_engine import build_fake_engine

FAKE = "troth.testing.fake_engine:build_fake_engine"
BUILT_BY = "tests.portable.isolated_engines:"
Scenario = Callable[[ProcessEngineClient], Coroutine[Any, Any, None]]


@pytest.fixture(autouse=True)
def _own_folder_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where another test run on this machine leaves nothing. ``tmp_path``, made before, is too long for a socket."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


def request(name: str = "r", max_tokens: int | None = None, **changes: Any) -> Request:
    values: dict[str, Any] = {"prompt_ids": (1, 2, 3), "eos_ids": frozenset({EOS_ID}), "max_tokens": max_tokens}
    return Request(request_id=RequestId(name), **values | changes)


def run(scenario: Scenario, factory: str = FAKE, options: dict[str, Any] | None = None, **arguments: Any) -> None:
    """Run a scenario with a started client that is closed whatever happens; nothing of it may be left behind."""

    async def main() -> int | None:
        client = ProcessEngineClient(factory, options or {}, name="tiny", **arguments)
        client.start()
        pid = client.process_id
        try:
            async with asyncio.timeout(30):
                await scenario(client)
        finally:
            pid = client.process_id or pid
            await client.aclose()
        return pid

    pid = asyncio.run(main())
    assert pid is not None
    assert not is_alive(pid)
    assert not list(Path(tempfile.gettempdir()).glob("troth-*"))


def is_alive(pid: int) -> bool:
    """Whether a process exists, zombies included."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def is_running(pid: int) -> bool:
    """Whether a process that is not ours exists and is no zombie: nobody may be there to reap an orphan."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.parent.parent.exists():
        return is_alive(pid)
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def collect(client: ProcessEngineClient, one: Request) -> list[Event]:
    return [event async for event in client.submit(one)]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Segment))


def test_client_streams_what_the_engine_would_stream_in_process() -> None:
    async def scenario(client: ProcessEngineClient) -> None:
        await client.ready()
        there = await collect(client, request())
        engine = build_fake_engine({"text": "Grüße"}, lambda *progress: None)
        here = [event async for event in engine.submit(request())]
        assert [event for event in there if not isinstance(event, Completed)] == here[:-1]
        assert isinstance(there[-1], Completed)
        assert isinstance(here[-1], Completed)
        assert there[-1].usage == here[-1].usage

    run(scenario, options={"text": "Grüße"})


def test_client_keeps_many_streams_apart() -> None:
    async def scenario(client: ProcessEngineClient) -> None:
        await client.ready()
        requests = [request(f"r{index}", max_tokens=index + 1) for index in range(40)]
        answers = await asyncio.gather(*(collect(client, one) for one in requests))
        assert [text_of(events) for events in answers] == [("abcdefgh" * 8)[: index + 1] for index in range(40)]
        status = await client.status()
        assert status.num_requests_by_end == {"length": 40}

    run(scenario, options={"text": "abcdefgh" * 8, "max_rows": 4})


def test_client_reports_loading_and_refuses_until_ready(tmp_path: Path) -> None:
    gate = tmp_path / "go"

    async def scenario(client: ProcessEngineClient) -> None:
        with pytest.raises(NotReady):
            _ = client.info
        (refused,) = await collect(client, request())
        assert isinstance(refused, Failed)
        assert refused.kind == "NotReady"
        assert refused.retry_after_s is not None
        while "weights 50 %" not in _refusal(client):
            await asyncio.sleep(0.01)
        assert (await client.status()).state == "loading"
        gate.touch()
        assert (await client.ready()).model == "fake"
        assert text_of(await collect(client, request())) == "late"

    run(scenario, BUILT_BY + "build_slowly", {"until": str(gate)})


def test_aclose_does_not_wait_for_a_factory_that_still_loads() -> None:
    async def scenario(client: ProcessEngineClient) -> None:
        while "weights" not in _refusal(client):
            await asyncio.sleep(0.01)
        began = time.monotonic()
        await client.aclose()
        assert time.monotonic() - began < 5

    run(scenario, BUILT_BY + "build_slowly", {"until": "/nonexistent"})


@pytest.mark.parametrize(
    ("factory", "how", "error", "clue"),
    [
        (BUILT_BY + "build_never", "load", ModelLoadError, "model.gguf: bad magic"),
        (BUILT_BY + "build_never", "bug", DeviceError, "KeyError: 'lm_head'"),
        (BUILT_BY + "build_never", "exit", DeviceError, "exit code 7"),
        ("troth.nowhere:build", "", OptionError, "troth.nowhere"),
        ("no colon", "", OptionError, "package.module:function"),
    ],
)
def test_client_raises_why_loading_failed(factory: str, how: str, error: type[TrothError], clue: str) -> None:
    async def scenario(client: ProcessEngineClient) -> None:
        with pytest.raises(error, match=clue):
            await client.ready()
        (failed,) = await collect(client, request())
        assert isinstance(failed, Failed)
        assert failed.kind == error.__name__
        assert (await client.status()).state == "failed"

    run(scenario, factory, {"how": how})


def test_client_does_not_restart_what_could_not_be_loaded() -> None:
    async def scenario(client: ProcessEngineClient) -> None:
        with pytest.raises(ModelLoadError):
            await client.ready()
        await asyncio.sleep(0.3)
        assert client.state == "failed"

    run(scenario, BUILT_BY + "build_never", {"how": "load"}, restart=RestartPolicy(early_delay_s=0.0))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_crash_fails_every_stream_and_names_the_signal(number: signal.Signals) -> None:
    async def scenario(client: ProcessEngineClient) -> None:
        await client.ready()
        streams = [client.submit(request(f"r{index}")) for index in range(6)]
        first = [await anext(stream) for stream in streams[:2]]
        assert all(isinstance(event, Prefill) for event in first)
        pid = client.process_id
        assert pid is not None
        os.kill(pid, number)
        for stream in streams:
            *_, last = [event async for event in stream]
            assert isinstance(last, Failed)
            assert last.kind == "DeviceError"
            assert number.name in last.message
        with pytest.raises(DeviceError, match=number.name):
            _ = client.info
        (refused,) = await collect(client, request())
        assert isinstance(refused, Failed)
        assert refused.kind == "DeviceError"

    run(scenario, options={"step_s": 0.02, "max_rows": 2})


def test_crash_is_followed_by_a_restart_when_the_policy_allows() -> None:
    async def scenario(client: ProcessEngineClient) -> None:
        for _ in range(2):
            await client.ready()
            stream = client.submit(request())
            await anext(stream)
            crashed = client.process_id
            assert crashed is not None
            os.kill(crashed, signal.SIGKILL)
            *_, last = [event async for event in stream]
            assert isinstance(last, Failed)
            (refused,) = await collect(client, request())
            assert isinstance(refused, Failed)
            assert refused.kind == "NotReady"
        await client.ready()
        assert client.process_id != crashed
        assert text_of(await collect(client, request())) == "again"

    run(
        scenario,
        options={"text": "again", "step_s": 0.01},
        restart=RestartPolicy(max_restarts=2, early_delay_s=0.05),
    )


def test_restarts_stop_at_the_limit_of_the_window() -> None:
    async def scenario(client: ProcessEngineClient) -> None:
        for _ in range(3):
            await client.ready()
            pid = client.process_id
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            while client.state == "ready":
                await asyncio.sleep(0.005)
        assert client.state == "failed"

    run(scenario, restart=RestartPolicy(max_restarts=2, early_delay_s=0.0))


def test_cancel_ends_a_stream_and_frees_its_row() -> None:
    async def scenario(client: ProcessEngineClient) -> None:
        await client.ready()
        stream = client.submit(request(max_tokens=4000, eos_ids=frozenset()))
        async for event in stream:
            if isinstance(event, Segment):
                break
        stream.cancel("requested")
        *_, last = [event async for event in stream]
        assert isinstance(last, Completed)
        assert last.finish_reason == "aborted"
        assert (await client.status()).num_running == 0

    run(scenario, options={"step_s": 0.002})


def test_cancel_right_after_submit_is_not_lost() -> None:
    async def scenario(client: ProcessEngineClient) -> None:
        await client.ready()
        stream = client.submit(request(max_tokens=4000, eos_ids=frozenset()))
        stream.cancel()
        *_, last = [event async for event in stream]
        assert isinstance(last, Completed)
        assert last.finish_reason == "aborted"

    run(scenario, options={"step_s": 0.002})


def test_dropping_a_stream_cancels_it_in_the_other_process() -> None:
    async def scenario(client: ProcessEngineClient) -> None:
        await client.ready()
        stream = client.submit(request(max_tokens=4000, eos_ids=frozenset()))
        await anext(stream)
        del stream
        gc.collect()
        while (await client.status()).num_requests_by_end != {"aborted": 1}:
            await asyncio.sleep(0.005)

    run(scenario, options={"step_s": 0.002})


def test_consumer_that_does_not_read_holds_its_own_row_alone() -> None:
    async def scenario(client: ProcessEngineClient) -> None:
        await client.ready()
        idle = client.submit(request("idle", max_tokens=2000, eos_ids=frozenset()))
        quick = await collect(client, request("quick", max_tokens=1000, eos_ids=frozenset()))
        assert len(text_of(quick)) == 1000
        # Neither side may hold more than a window beside what the engine itself keeps back.
        assert idle._queue.num_queued <= wire.WINDOW_EVENTS
        events = [event async for event in idle]
        assert len(text_of(events)) == 2000

    run(scenario)


def test_window_counts_tokens_as_well_as_events() -> None:
    async def scenario(client: ProcessEngineClient) -> None:
        await client.ready()
        idle = client.submit(request("idle", max_tokens=5000, eos_ids=frozenset()))
        await collect(client, request("quick", max_tokens=5000, eos_ids=frozenset()))
        queued = idle._queue._events
        num_tokens = max(event.num_completion_tokens for event in queued if isinstance(event, Segment))
        assert num_tokens <= wire.WINDOW_TOKENS
        assert len(text_of([event async for event in idle])) == 5000

    run(scenario, options={"text": "x", "step_tokens": 100})


def test_step_larger_than_the_token_window_still_passes() -> None:
    async def scenario(client: ProcessEngineClient) -> None:
        await client.ready()
        events = await collect(client, request(max_tokens=2000, eos_ids=frozenset()))
        assert len(text_of(events)) == 2000

    run(scenario, options={"text": "x", "step_tokens": 700})


def test_idle_consumer_is_cancelled_by_the_engine_behind_the_window() -> None:
    async def scenario(client: ProcessEngineClient) -> None:
        await client.ready()
        stream = client.submit(request(max_tokens=3000, eos_ids=frozenset()))
        while (await client.status()).num_requests_by_end != {"Cancelled": 1}:
            await asyncio.sleep(0.01)
        *_, last = [event async for event in stream]
        assert isinstance(last, Failed)
        assert "consumer_idle" in last.message

    run(scenario, options={"consumer_idle_s": 0.05})


def test_engine_that_failed_for_good_ends_its_process_and_another_starts() -> None:
    """The process lived on, ready by its looks, and refused every request for ever."""

    async def scenario(client: ProcessEngineClient) -> None:
        await client.ready()
        pid = client.process_id
        running = asyncio.create_task(collect(client, request("running", max_tokens=4000, eos_ids=frozenset())))
        await asyncio.sleep(0.05)
        for events in await asyncio.gather(collect(client, request("fatal")), running):
            assert isinstance(events[-1], Failed)
            assert (events[-1].kind, events[-1].message) == ("DeviceError", "the engine is broken")
        while client.state == "ready":
            await asyncio.sleep(0.005)
        assert isinstance((await collect(client, request()))[-1], Failed)
        await client.ready()
        assert client.process_id not in (None, pid)
        assert isinstance((await collect(client, request("healthy")))[-1], Completed)

    run(scenario, BUILT_BY + "build_mortal", restart=RestartPolicy(early_delay_s=0.05))


def test_refusal_keeps_its_fields_on_the_way() -> None:
    """Failures made on either side lost what they were about."""

    async def scenario(client: ProcessEngineClient) -> None:
        (loading,) = await collect(client, request())
        assert isinstance(loading, Failed)
        assert loading.retry_after_s
        await client.ready()
        *_, refused = await collect(client, request(prompt_ids=()))
        assert isinstance(refused, Failed)
        assert (refused.kind, refused.param, refused.code) == ("RequestError", "prompt", "invalid_value")
        stream = client.submit(request(max_tokens=4000, eos_ids=frozenset()))
        reading = asyncio.create_task(_last(stream))
        await asyncio.sleep(0.05)
        await client.aclose()
        last = await reading
        assert isinstance(last, Failed)
        assert "engine_closed" in last.message

    run(scenario, options={"step_s": 0.002})


def test_aclose_ends_running_streams_with_cancelled() -> None:
    async def scenario(client: ProcessEngineClient) -> None:
        await client.ready()
        stream = client.submit(request(max_tokens=4000, eos_ids=frozenset()))
        reading = asyncio.create_task(_last(stream))
        await asyncio.sleep(0.05)
        await asyncio.gather(client.aclose(), client.aclose())
        last = await reading
        assert isinstance(last, Failed)
        assert last.kind == "Cancelled"
        (refused,) = await collect(client, request())
        assert isinstance(refused, Failed)
        assert refused.kind == "NotReady"
        assert (await client.status()).state == "closed"

    run(scenario, options={"step_s": 0.002})


def test_process_leaves_it_to_the_server_what_a_signal_to_all_of_them_means() -> None:
    """Service managers send SIGTERM to every process; answers may still go on for a while."""

    async def scenario(client: ProcessEngineClient) -> None:
        await client.ready()
        assert client.process_id is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(client.process_id, number)
        events = [event async for event in client.submit(request(max_tokens=3))]
        assert isinstance(events[-1], Completed)

    run(scenario)


@pytest.mark.parametrize("how", ["hang", "stubborn"])
def test_aclose_ends_a_process_that_hangs(how: str) -> None:
    async def scenario(client: ProcessEngineClient) -> None:
        await client.ready()
        stream = client.submit(request())
        with pytest.raises(NotReady, match="gave no status within"):
            await client.status()
        await client.aclose()
        (last,) = [event async for event in stream]
        assert isinstance(last, Failed)
        assert last.kind == "Cancelled"

    run(scenario, BUILT_BY + "build_blind", {"how": how}, close_timeout_s=0.2, status_timeout_s=0.2)


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGSTOP")
def test_client_of_a_stopped_process_says_so_until_it_speaks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was called ready, and its requests waited for ever."""
    monkeypatch.setattr("troth.runtime.isolate.BEAT_S", 0.2)

    async def reaches(client: ProcessEngineClient, state: str) -> None:
        while client.state != state:
            await asyncio.sleep(0.02)

    async def scenario(client: ProcessEngineClient) -> None:
        info = await client.ready()
        # Longer than the allowed silence, as a living process has something to say.
        await asyncio.sleep(2.5)
        assert client.state == "ready"
        assert client.process_id is not None
        os.kill(client.process_id, signal.SIGSTOP)
        running = client.submit(request("running"))
        await reaches(client, "unresponsive")
        for ask in (client.ready, client.status):
            with pytest.raises(NotReady, match="may hang or be stopped"):
                await ask()
        (refused,) = await collect(client, request("refused"))
        assert isinstance(refused, Failed)
        assert refused.kind == "NotReady"
        os.kill(client.process_id, signal.SIGCONT)
        await reaches(client, "ready")
        assert client.info == info
        assert isinstance([event async for event in running][-1], Completed)
        assert isinstance((await collect(client, request()))[-1], Completed)

    run(scenario, silence_s=2.0)


def test_aclose_right_after_start_leaves_nothing() -> None:
    async def scenario(client: ProcessEngineClient) -> None:
        await client.aclose()
        assert client.state == "closed"
        with pytest.raises(NotReady, match="closed"):
            await client.ready()

    run(scenario)


def test_aclose_while_a_restart_waits_starts_nothing_more() -> None:
    async def scenario(client: ProcessEngineClient) -> None:
        await client.ready()
        pid = client.process_id
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while client.state == "ready":
            await asyncio.sleep(0.005)
        assert client.state == "loading"
        await client.aclose()
        assert client.process_id is None

    run(scenario, restart=RestartPolicy(early_delay_s=30.0))


def test_status_asked_of_a_process_that_crashes_is_answered() -> None:
    async def scenario(client: ProcessEngineClient) -> None:
        await client.ready()
        asking = asyncio.create_task(client.status())
        await asyncio.sleep(0)
        pid = client.process_id
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert (await asking).state in ("ready", "failed")

    run(scenario)


def test_client_fails_in_words_when_no_process_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def popen(*arguments: Any, **options: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("subprocess.Popen", popen)

    async def main() -> None:
        client = ProcessEngineClient(FAKE, {})
        client.start()
        with pytest.raises(DeviceError, match="Cannot allocate memory"):
            await client.ready()
        await client.aclose()

    asyncio.run(main())
    assert not list(Path(tempfile.gettempdir()).glob("troth-*"))


def test_engine_that_raises_from_submit_fails_that_request_alone() -> None:
    async def scenario(client: ProcessEngineClient) -> None:
        await client.ready()
        (failed,) = await collect(client, request())
        assert isinstance(failed, Failed)
        assert failed.kind == "StreamProtocol"
        assert "ZeroDivisionError" in failed.message
        assert (await client.status()).state == "ready"

    run(scenario, BUILT_BY + "build_blind", {"how": "raise"})


def test_client_fails_when_the_process_speaks_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("troth.runtime.isolate.WIRE_VERSION", wire.WIRE_VERSION + 1)

    async def scenario(client: ProcessEngineClient) -> None:
        with pytest.raises(StreamProtocol, match="wire version"):
            await client.ready()

    run(scenario)


def test_process_ends_when_its_server_is_killed() -> None:
    """An engine must not outlive a server that had no chance to say goodbye."""
    server = textwrap.dedent(
        f"""
        import asyncio
        from troth.runtime.isolate import ProcessEngineClient

        async def main():
            client = ProcessEngineClient({FAKE!r}, {{}})
            client.start()
            await client.ready()
            print(client.process_id, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
        """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", server], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert is_alive(pid)
        process.kill()
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline, "the engine process outlived its server"
        time.sleep(0.02)


def test_socket_folder_is_private_and_gone_once_the_process_has_connected() -> None:
    async def scenario(client: ProcessEngineClient) -> None:
        child = client._child
        assert child is not None
        assert os.stat(child._folder).st_mode & 0o777 == 0o700
        await client.ready()
        assert not os.path.exists(child._folder)

    run(scenario)


def test_stranger_on_the_socket_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loopback port anyone may connect; a hello with a wrong token must not take the engine's place."""
    import zmq

    monkeypatch.setattr("troth.runtime.child._MAX_IPC_PATH", 0)
    reports: list[dict[str, Any]] = []

    async def scenario(client: ProcessEngineClient) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context))
        child = client._child
        assert child is not None
        endpoint = child._socket._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        assert endpoint.startswith("tcp://127.0.0.1:")
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.connect(endpoint)
            stranger.send(wire.encode(wire.Hello(wire.WIRE_VERSION, "guess", 1)))
            stranger.send(wire.encode(wire.LoadFailed("ModelLoadError", "a lie")))
            await client.ready()
            stranger.send(wire.encode(wire.LoadFailed("ModelLoadError", "a lie")))
            assert text_of(await collect(client, request())) == "mine"
            stranger.close(linger=0)
        assert all("stranger" in str(report["exception"]) for report in reports)

    run(scenario, options={"text": "mine"})


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="this system has no /proc to count descriptors in")
def test_open_descriptors_do_not_grow_over_starts_and_crashes() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def once(client: ProcessEngineClient) -> None:
        await client.ready()
        await collect(client, request())

    run(once)
    before = count()
    for _ in range(3):
        run(once)
    assert count() <= before


@pytest.mark.parametrize(("code", "words"), [(0, "exit code 0"), (-9, "SIGKILL"), (-250, "signal 250")])
def test_cause_names_codes_and_signals(code: int, words: str) -> None:
    assert words in cause_of(code)


def _refusal(client: ProcessEngineClient) -> str:
    try:
        return client.info.model
    except NotReady as error:
        return str(error)


async def _last(stream: Any) -> Event:
    *_, last = [event async for event in stream]
    return last
