"""Two ranks add up a tensor on one GPU over NCCL; prints why they cannot, or nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WAIT_SECONDS = 40.0


def be(rank: int, place: str) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    store = dist.FileStore(place, 2)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
    token = torch.ones(1, device="cuda")
    dist.all_reduce(token)
    if token.item() != 2:
        raise RuntimeError(f"1 + 1 is {token.item()}")
    os._exit(0)


def main() -> None:
    if len(sys.argv) > 1:
        be(int(sys.argv[1]), sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(2):
            with Path(folder, f"said{rank}").open("w") as said:
                command = [sys.executable, __file__, str(rank), f"{folder}/store"]
                ranks.append(subprocess.Popen(command, stderr=said, stdout=said))
        deadline = time.monotonic() + WAIT_SECONDS
        for number, one in enumerate(ranks):
            try:
                failed = one.wait(max(0.1, deadline - time.monotonic())) != 0
                why = "it fails"
            except subprocess.TimeoutExpired:
                failed, why = True, "it hangs"
            if failed:
                said_last = Path(folder, f"said{number}").read_text().splitlines()
                lines = [line for line in said_last if "rror" in line or "uplicate" in line]
                print(f"{why}; {lines[-1] if lines else ''}")
                break
        for one in ranks:
            one.kill()
            one.wait()


if __name__ == "__main__":
    main()
