"""One machine of the lab as the keeper sees it, without namespaces."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from slurm_resilience.errors import LabError
from slurm_resilience.lab.machines.machine import Machine
from slurm_resilience.lab.machines.network import Network
from slurm_resilience.lab.machines.processes import Processes


class _NoCable:
    """A network in which the cable of a machine has gone already."""

    async def pull(self, name: str) -> None:
        raise LabError(f"`ip link set p-{name} down` failed")

    async def unplug(self, name: str) -> None:
        pass


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_cable_may_be_gone_with_a_machine_that_ended_by_itself(
    tmp_path: Path, has_ended: bool
) -> None:
    """A node that reboots itself takes its namespace along, and with it its end of the cable."""

    async def kill() -> Machine:
        machine = Machine("n2", 2, tmp_path, cast(Processes, None), cast(Network, _NoCable()))
        machine.pid, machine.end = 2**22 + 1, asyncio.get_running_loop().create_future()
        if has_ended:
            machine.end.set_result(-1)
        await machine.kill()
        return machine

    if has_ended:
        assert not asyncio.run(kill()).powered
    else:
        with pytest.raises(LabError, match="p-n2 down"):
            asyncio.run(kill())
