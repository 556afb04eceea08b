"""Kills one of two engines on one disk cache at random moments, and checks what the next ones are served from it.

Run as ``python -m tests.cpu.engine_killer FOLDER TIMES MODEL ...``, with 200 for a whole check and folders of small
saved models; prints one line for each, or fails. A process of its own, so that forking does not meet the test runner's
threads.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from tests.cpu.disk_world import load, text, world
from troth.cache.disk_folder import DiskFolder
from troth.contracts.request import Request
from troth.models.family import Model

NUM_TEXTS = 6
NUM_TURNS = 3


def turn_of(number: int, turn: int) -> Request:
    """A conversation's turn begins with what the one before it had: later ones extend what is kept."""
    whole = text(number, 60 * NUM_TURNS, most=4)
    return replace(whole, prompt_ids=whole.prompt_ids[: 60 * (turn + 1)])


def serve_for_ever(model: Model, folder: Path, seed: int) -> None:
    """What a server does all day; now and then it is opened anew, and looks through the folder."""
    generator = random.Random(seed)
    while True:
        with world(model, folder) as served:
            for _ in range(3):
                number = generator.randrange(NUM_TEXTS)
                for turn in range(NUM_TURNS):
                    served.serve(turn_of(number, turn))


def cold_answers(model: Model, folder: Path) -> list[list[int]]:
    """What each conversation's last turn is answered without any cache."""
    with world(model, folder) as served:
        requests = [replace(turn_of(number, NUM_TURNS - 1), prompt_cache=False) for number in range(NUM_TEXTS)]
        return [answer.token_ids for answer in served.serve(*requests)]


def check(model: Model, folder: Path, expected: list[list[int]]) -> tuple[int, int]:
    """Answers are those of a cold engine whatever was left; (tokens that came back, damaged files)."""
    with world(model, folder) as served:
        answers = served.serve(*(turn_of(number, NUM_TURNS - 1) for number in range(NUM_TEXTS)))
        assert [answer.token_ids for answer in answers] == expected, "a wrong token"
        status = served.status
        assert not status.trouble, status
    return status.num_restored_tokens, status.num_damaged


def check_folder(folder: Path) -> None:
    """Once nobody writes any more, the index knows every file and nothing else is left."""
    opened = DiskFolder(folder, quota_bytes=10**9)
    opened.close()
    files = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*.safetensors")}
    assert opened.num_bytes == sum(files.values()), f"{sum(files.values())} bytes of files, {opened.num_bytes} listed"
    assert not list(folder.glob("scratch-*")), "a dead process's scratch folder was left"


def fork_server(model: Model, folder: Path, seed: int) -> int:
    """The process id of a server."""
    child = os.fork()
    if child == 0:
        try:
            serve_for_ever(model, folder, seed)
        finally:
            os._exit(1)
    return child


def kill(children: list[int], which: int) -> None:
    """End one, which must still have been at work."""
    child = children.pop(which)
    assert os.waitpid(child, os.WNOHANG) == (0, 0), "a server ended by itself"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def run(path: Path, folder: Path, times: int) -> None:
    """Two servers at a time; after each kill a third one looks, while the other goes on."""
    model = load(path)
    expected = cold_answers(model, folder / "cold")
    cache, generator = folder / "cache", random.Random(path.name)
    children = [fork_server(model, cache, seed) for seed in range(2)]
    restored = damaged = 0
    for seed in range(2, times + 2):
        time.sleep(generator.uniform(0.0, 0.5))
        kill(children, generator.randrange(2))
        came, hurt = check(model, cache, expected)
        restored, damaged = restored + came, damaged + hurt
        children.append(fork_server(model, cache, seed))
    while children:
        kill(children, 0)
    check_folder(cache)
    print(f"{path.name}: {times} kills, {restored} tokens restored right, {damaged} damaged files", flush=True)


def main() -> None:
    """Each model in a folder of its own."""
    torch.set_num_threads(1)
    folder, times, *paths = Path(sys.argv[1]), int(sys.argv[2]), *map(Path, sys.argv[3:])
    for path in paths:
        (folder / path.name).mkdir(parents=True)
        run(path, folder / path.name, times)


if __name__ == "__main__":
    main()
