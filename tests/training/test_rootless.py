"""The rootless start alone, without `resilient`: ranks in processes of their own form a group."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace as Address

import psutil
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from slurm_resilience.training.process_group import rootless
from slurm_resilience.training.process_group.gloo_interface import (
    GLOO_INTERFACE,
    listen_beside_mesh,
)
from slurm_resilience.training.process_group.rootless import LEAVES

pytestmark = pytest.mark.training
SIZE = 3
PROGRAM = """
import os
import torch
import torch.distributed as dist
from slurm_resilience.training.process_group import rootless

with rootless(timeout=60) as world:
    dist.init_process_group("gloo", store=world.store, rank=world.rank, world_size=world.size)
    token = torch.tensor([10.0 ** world.rank])
    dist.all_reduce(token)
    pair = dist.new_group([0, 2])
    if world.rank != 1:
        dist.all_reduce(token, group=pair)
    dist.barrier()
# The default group outlives the store.
dist.barrier()
print(world.rank, world.size, int(token), os.environ["GLOO_SOCKET_IFNAME"])
dist.destroy_process_group()
"""


def run(meet: str, secret: str = "") -> list[str]:
    """Run the ranks, and return their output in the order of their seats."""
    values = os.environ | {
        "SRES_MEET": meet,
        "SRES_SEATS": str(SIZE),
        "SRES_ADDRESS": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "",
        "OMP_NUM_THREADS": "1",
        "SRES_SECRET": secret,
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=values | {"SRES_SEAT": str(seat)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seat in range(SIZE)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * SIZE
    finally:
        for rank in ranks:
            rank.kill()
    return said


@pytest.mark.parametrize(
    ("host", "given", "chosen"),
    [
        ("10.0.0.5", "", "ib0"),
        ("fd00::5", "", "eth1"),
        ("10.0.0.5", "eth9", "eth9"),
        # The first address of `lo` is another one, and so is that of `eth0`.
        ("10.1.1.1", "", ""),
        ("192.168.0.8", "", ""),
        ("no-such-name.invalid", "", ""),
    ],
)
def test_gloo_listens_on_the_interface_of_the_mesh(
    monkeypatch: pytest.MonkeyPatch, host: str, given: str, chosen: str
) -> None:
    ipv4, ipv6, packet = socket.AF_INET, socket.AF_INET6, socket.AF_PACKET
    found = {
        "lo": [(ipv4, "127.0.0.1"), (ipv4, "10.1.1.1"), (ipv6, "::1")],
        "eth0": [(packet, "00:00"), (ipv4, "192.168.0.7"), (ipv4, "192.168.0.8")],
        "eth1": [(packet, "00:01"), (ipv6, "fd00::5")],
        "ib0": [(packet, "00:02"), (ipv4, "10.0.0.5"), (ipv6, "fe80::1%ib0")],
    }
    interfaces = {
        name: [Address(family=family, address=address) for family, address in ones]
        for name, ones in found.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setenv(GLOO_INTERFACE, given)
    listen_beside_mesh(host)
    assert os.environ[GLOO_INTERFACE] == chosen


WANTED = ["0 3 222 lo\n", "1 3 111 lo\n", "2 3 222 lo\n"]
"""gloo listens where the mesh does, wherever this machine's name leads."""


def test_on_a_shared_directory_twice(tmp_path: Path) -> None:
    for _ in range(2):
        assert run(f"dir:{tmp_path}/meet") == WANTED


def test_without_a_shared_directory() -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(SIZE)]
        ports = [listener.getsockname()[1] for listener in held]
    meet = "peers:" + ",".join(f"127.0.0.1:{port}" for port in ports)
    assert run(meet, secrets.token_hex(16)) == WANTED


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    environment = {
        "SRES_MEET": f"dir:{tmp_path}",
        "SRES_SEAT": "0",
        "SRES_SEATS": "2",
        "SRES_ADDRESS": "127.0.0.1",
    }
    with (
        pytest.raises(TimeoutError, match="1 of 2"),
        rootless(environment, timeout=0.5),
    ):
        pass


def seat(number: int, meet: Path) -> dict[str, str]:
    """Return the environment of one of two ranks."""
    return {
        "SRES_MEET": f"dir:{meet}",
        "SRES_SEAT": str(number),
        "SRES_SEATS": "2",
        "SRES_ADDRESS": "127.0.0.1",
    }


def test_a_rank_that_is_through_keeps_the_store_for_one_that_still_forms(tmp_path: Path) -> None:
    def quick() -> None:
        with rootless(seat(0, tmp_path), timeout=60) as world:
            world.store.set("mine", "0")

    other = threading.Thread(target=quick)
    other.start()
    with rootless(seat(1, tmp_path), timeout=60) as world:
        world.store.wait(["mine"])
        # Either it waits for this rank, or it is gone.
        while other.is_alive() and not world.store.check([f"{LEAVES}0"]):
            other.join(0.01)
        assert other.is_alive()
        assert world.store.add("count", 1) == 1
    other.join(60)
    assert not other.is_alive()


def test_a_rank_at_the_end_does_not_wait_for_one_that_failed(tmp_path: Path) -> None:
    def failing() -> None:
        with suppress(ArithmeticError), rootless(seat(0, tmp_path), timeout=60) as world:
            world.store.wait(["formed"])
            raise ArithmeticError

    other = threading.Thread(target=failing)
    other.start()
    with rootless(seat(1, tmp_path), timeout=600) as world:
        world.store.set("formed", "1")
    other.join(60)
    assert not other.is_alive()
