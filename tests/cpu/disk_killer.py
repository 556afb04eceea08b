"""Kills processes that write to a disk tier at random moments, and checks what they leave behind.

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


def write_for_ever(folder: Path, seed: int) -> None:
    """What a server does all day."""
    tier = DiskTier(folder, NAMESPACE, quota_bytes=QUOTA)
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


def main() -> None:
    """Fork, kill, check, again."""
    folder, times = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    served = 0
    for seed in range(times):
        child = os.fork()
        if child == 0:
            write_for_ever(folder, seed)
        time.sleep(random.Random(seed).uniform(0.005, 0.08))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        served += check(folder)
    print(f"{times} kills, {served} blocks served right")


if __name__ == "__main__":
    main()
