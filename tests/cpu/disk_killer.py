"""Kills processes that write to one disk tier at random moments, and checks what they leave behind.

Run as ``python -m tests.cpu.disk_killer FOLDER TIMES``; prints one line at the end, or fails. A process of its own, so
that forking does not meet the test runner's threads.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from tests.cpu.disk_blocks import NAMESPACE, QUOTA, chain, check_spans, tensors_of
from troth.cache.disk_tier import DiskTier

AT_ONCE = 2
"""Writers."""
LONGEST_S = 0.02
"""Before the next of them is killed."""
CHECKED_EACH = 8
"""Kills; what one of them leaves, the next writers meet."""


def write_for_ever(folder: Path, seed: int) -> None:
    """What a server does all day."""
    tier = DiskTier(folder, NAMESPACE, quota_bytes=QUOTA)
    assert not tier.trouble, tier.trouble
    generator = random.Random(seed)
    while True:
        names = chain(generator.randrange(40))
        tier.offer("kv0", names[:4], tensors_of(names[:4]))
        tier.offer("kv0", names[4:], tensors_of(names[4:]))
        tier.read("kv0", names)
        tier.flush()


def check(folder: Path) -> int:
    """Every block that is served is the right one; how many were."""
    tier = DiskTier(folder, NAMESPACE, quota_bytes=QUOTA)
    served = 0
    for number in range(40):
        names = chain(number)
        served += check_spans(names, tier.read("kv0", names))
    status = tier.status()
    assert not status.trouble, status
    tier.close()
    files = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    assert files == status.num_bytes <= QUOTA, f"{files} bytes of files, {status.num_bytes} listed"
    assert not list(folder.glob("scratch-*")), "a dead process's scratch folder was left"
    return served


def fork_writer(folder: Path, seed: int) -> int:
    """The process id of a writer."""
    child = os.fork()
    if child == 0:
        try:
            write_for_ever(folder, seed)
        finally:
            os._exit(1)
    return child


def main() -> None:
    """Fork, kill, check, again."""
    folder, times = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    generator = random.Random(times)
    served = 0
    for seed in range(0, times, AT_ONCE):
        children = [fork_writer(folder, seed + number) for number in range(min(AT_ONCE, times - seed))]
        for child in children:
            time.sleep(generator.uniform(0.0, LONGEST_S))
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "a writer ended by itself"
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
        if seed % CHECKED_EACH == 0:
            served += check(folder)
    served += check(folder)
    print(f"{times} kills, {served} blocks served right")


if __name__ == "__main__":
    main()
