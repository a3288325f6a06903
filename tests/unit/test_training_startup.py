"""The tasks of a process before it joins."""

from __future__ import annotations

import importlib
import socket
import sys

import pytest

startup = pytest.importorskip(
    "slurm_resilience.training.recovery.startup", reason="torch is not installed"
)

from slurm_resilience.mesh import own_address  # noqa: E402
from slurm_resilience.mesh.model import PeerStatus  # noqa: E402
from slurm_resilience.mesh.own_address import SRUN_ADDRESS, STEP_NODES  # noqa: E402
from slurm_resilience.training import compat  # noqa: E402
from slurm_resilience.training.options import Options  # noqa: E402
from slurm_resilience.training.rank_environment import read_environment  # noqa: E402


@pytest.mark.parametrize(("value", "told"), [("1", 1), ("true", 1), ("0", 0), ("", 0), ("no", 0)])
def test_groups_connect_at_once(value: str, told: int, caplog: pytest.LogCaptureFixture) -> None:
    environment = {startup.LAZY: value, "HOME": "/"}
    startup.connect_at_once(environment)
    assert environment == {"HOME": "/"}
    assert caplog.text.count("is not used") == told
    startup.connect_at_once(environment)
    assert environment == {"HOME": "/"}


def test_forming_the_first_world_imports_nothing_more() -> None:
    importlib.import_module("torch.distributed.tensor")
    startup.warm_up(Options())
    known = set(sys.modules)
    compat.forget_layouts()
    assert set(sys.modules) == known


def test_a_process_says_what_it_can_read_before_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is alone forms a world at once: it would begin from scratch, beside a checkpoint."""
    block = importlib.import_module("slurm_resilience.training.block")
    done: list[str] = []

    class Heard:
        """In the mesh's place."""

        def __init__(self, *_: object, **__: object) -> None: ...

        def say(self, status: PeerStatus) -> None:
            done.append(f"{status.phase}, step {status.disk} on the disk")

        def start(self) -> None:
            done.append("joins")

    class Disk:
        """In the checkpointer's place."""

        save = load = due = missing = decided = wait = break_off = close = latest = None

        def readable(self) -> int:
            return 8

    monkeypatch.setattr(block, "Mesh", Heard)
    monkeypatch.setattr(block.log_lines, "speak", lambda _: None)  # or later tests have it
    where = read_environment({"SRES_MEET": "alone"})
    block.BlockRunner(Options(checkpointer=Disk()), where)
    assert done == ["ready, step 8 on the disk", "joins"]


class Gpus:
    """In torch.cuda's place: a node with two, none in use."""

    def __init__(self, *, used: bool = False) -> None:
        self.is_initialized = lambda: used
        self.chosen: int | None = None

    def device_count(self) -> int:
        return 2

    def set_device(self, index: int) -> None:
        self.chosen = index


ROUTES = {"n1": "10.0.0.5", "10.0.0.9": "10.0.0.6", "debian": "127.0.0.1", "good": "10.0.0.7"}


@pytest.mark.parametrize(
    ("environment", "name", "chosen", "told"),
    [
        ({"MASTER_ADDR": "n1", SRUN_ADDRESS: "10.0.0.9"}, "debian", "10.0.0.5", 0),
        # `srun python train.py`: the machine's own name leads nowhere.
        ({SRUN_ADDRESS: "10.0.0.9"}, "debian", "10.0.0.6", 0),
        ({"MASTER_ADDR": "debian"}, "good", "10.0.0.7", 0),
        ({}, "debian", "127.0.0.1", 1),
        ({STEP_NODES: "2"}, "unknown", "127.0.0.1", 1),
        ({STEP_NODES: "1"}, "unknown", "127.0.0.1", 0),
        ({"SRES_ADDRESS": "here"}, "debian", "here", 0),
    ],
)
def test_a_rank_listens_where_other_nodes_reach_it(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    environment: dict[str, str],
    name: str,
    chosen: str,
    told: int,
) -> None:
    monkeypatch.setattr(own_address, "_route_to", lambda target: ROUTES.get(target, ""))
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert own_address.own_address(environment, on_one_machine=False) == chosen
    assert caplog.text.count("cannot reach this one") == told
    assert own_address.own_address({}, on_one_machine=True) == "127.0.0.1"
    assert caplog.text.count("cannot reach this one") == told


@pytest.mark.parametrize(
    ("environment", "chosen"),
    [({}, "10.0.0.8"), ({"MASTER_ADDR": "n1"}, "10.0.0.5"), ({STEP_NODES: "1"}, "127.0.0.1")],
)
def test_a_node_whose_name_leads_to_loopback_listens_on_its_default_route(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], chosen: str
) -> None:
    """Debian gives a machine's own name 127.0.1.1: nodes that were started by hand never met."""
    routes = ROUTES | {own_address.FAR_AWAY[0]: "10.0.0.8"}
    monkeypatch.setattr(own_address, "_route_to", lambda target: routes.get(target, ""))
    monkeypatch.setattr(socket, "gethostname", lambda: "debian")
    assert own_address.own_address(environment, on_one_machine=False) == chosen


@pytest.mark.parametrize(
    ("environment", "used", "chosen"),
    [
        ({"LOCAL_RANK": "1"}, False, 1),
        ({"SLURM_LOCALID": "1"}, False, 1),
        ({"LOCAL_RANK": "0", "SLURM_LOCALID": "1"}, False, None),
        ({"LOCAL_RANK": "1"}, True, None),
        ({"LOCAL_RANK": "3"}, False, None),
        ({}, False, None),
    ],
)
def test_each_rank_of_a_node_has_a_gpu_of_its_own(
    environment: dict[str, str], used: bool, chosen: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = Gpus(used=used)
    monkeypatch.setattr(startup.torch, "cuda", gpus)
    startup.take_gpu(environment)
    assert gpus.chosen == chosen
