"""Simulated trainings beside which a node comes and goes that was started for another size."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from slurm_resilience.mesh.model import Peer
from slurm_resilience.mesh.protocol.world_plan import WorldRules
from slurm_resilience.simulate.mesh_simulation import ENDLESS_STEPS, MeshRun, choose_timing
from slurm_resilience.simulate.sim_process import SimProcess

RUNS, SPEAKER_RUNS = 120, 40
MISFIT = "misfit"


class BesideMisfits(MeshRun):
    """A training, with processes of a larger one that come after its first world and go soon."""

    came = 0

    def _run(self) -> Any:
        self._misfits = Random(f"misfits {self._nodes.seed}")
        for number in range(self._misfits.randint(1, 3)):
            self.schedule.at(2.5 + 12 * self._misfits.random(), self._come, number)
        return super()._run()

    def _come(self, number: int) -> None:
        if not self.lineage.worlds or self.end.begun:
            return
        self.came += 1
        size, name = self.seats + 1, f"{MISFIT}{number}"
        seat = self._misfits.randrange(self.seats)
        peer = Peer(name, seat, node=name, host="h", port=1000 + number, seats=size)
        timing = choose_timing(self._nodes.seed)
        process = SimProcess(
            peer, WorldRules(size, size), self, ENDLESS_STEPS, timing, self.speakers
        )
        self.processes[name] = process
        process.start()
        self.schedule.after(0.2 + 6 * self._misfits.random(), self._go, process)

    def _go(self, process: SimProcess) -> None:
        if process.alive:
            process.die(False)

    def newest(self, seat: int) -> SimProcess:
        own = [one for one in self.processes.values() if not one.id.startswith(MISFIT)]
        return max((p for p in own if p.peer.seat == seat), key=lambda p: p.peer.incarnation)

    def kill(self, process: SimProcess, power: bool = False, replace: bool = True) -> None:
        if process.id.startswith(MISFIT):
            self._go(process)
        else:
            super().kill(process, power, replace)


@pytest.mark.parametrize(("speakers", "runs"), [(False, RUNS), (True, SPEAKER_RUNS)])
def test_a_training_outlasts_nodes_of_another_size(speakers: bool, runs: int) -> None:
    """It goes on, also where all its ranks have died, so that none knows of a world."""
    came = 0
    for seed in range(runs):
        training = BesideMisfits(seed, speakers=speakers)
        training.run()
        came += training.came
        for process in training.processes.values():
            stopped = process.membership.side.standing.stopped
            assert process.id.startswith(MISFIT) or stopped is None, (seed, process.id, stopped)
    assert came > runs / 5
