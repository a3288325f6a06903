"""All that a supervisor does to its own machine, in one place: the simulator has another one."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING

from slurm_resilience.resume.progress.step_listener import StepListener
from slurm_resilience.resume.srun import signals
from slurm_resilience.resume.srun.srun_process import close_sockets, connections
from slurm_resilience.resume.srun.step import SrunStep
from slurm_resilience.resume.srun.task_reports import TaskReports

if TYPE_CHECKING:
    from slurm_resilience.mesh.observer import Observer
    from slurm_resilience.model import Node
    from slurm_resilience.resume.progress.hang_evidence import NodeSigns
    from slurm_resilience.resume.progress.stack_gathering import AskedNodes
    from slurm_resilience.slurm.slurmd_port import PortsSeen


class HostCalls:
    """The machine that the supervisor runs on."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        """The supervisor's own."""
        self.uid = os.geteuid()
        """The user who runs it."""
        self.name = socket.gethostname()
        self.start_srun: Callable[..., SrunStep] = SrunStep

    def reports(self, ports: Sequence[int]) -> TaskReports:
        """Return the receiver of what slurmstepd tells.

        Args:
            ports: those that the site allows for srun; empty: any.
        """
        return TaskReports(ports)

    def steps(self, ports: Sequence[int]) -> StepListener:
        """Return the receiver of the steps that tasks report.

        Args:
            ports: those that the site allows for srun; empty: any.
        """
        return StepListener(ports)

    def node_signs(
        self,
        srun: str,
        environment: Mapping[str, str],
        asked: Sequence[AskedNodes],
        token: str,
        directory: str,
        seconds: float,
    ) -> tuple[NodeSigns, ...]:
        """Return what nodes tell of the processes of an attempt: `stack_gathering.ask_nodes`."""
        # Late: no step waits for what only a hang needs.
        from slurm_resilience.resume.progress.stack_gathering import ask_nodes

        return ask_nodes(srun, environment, asked, token, directory, seconds)

    def working_directory(self) -> Path:
        """Return the directory in which srun was started."""
        try:
            return Path.cwd()
        except OSError:
            return Path("/dev/null")  # removed meanwhile: nothing can be made in there

    def home_directory(self) -> Path | None:
        """Return the user's own folder; None: it is not told, or another user's."""
        home = Path(os.environ.get("HOME", ""))
        try:
            own = home.is_absolute() and home.stat().st_uid == self.uid
        except (OSError, ValueError):
            return None
        return home if own else None

    @contextlib.contextmanager
    def watched(self, seconds: float, tell: Callable[[], None]) -> Iterator[None]:
        """Have a thread tell of it where what is entered takes longer: this one may wait in the
        kernel, for a file system that does not answer.

        Args:
            seconds: from now on.
            tell: called at most once.
        """
        timer = threading.Timer(seconds, tell)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            # It would take signals of this process.
            timer.join()

    def receive_signals(self, on_signal: Callable[[Signals, bool], None]) -> None:
        """Hand each signal to the supervisor on, from now on."""
        signals.receive(on_signal)

    def show_bug(self) -> None:
        """Print the error that is being handled, with the way to it."""
        import traceback  # late: few supervisors ever need it

        # A log on a full disk is no reason to end the step, as it is none for `report`.
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exc()

    def end_by(self, number: int) -> None:
        """Die of a signal."""
        signals.end_by(number)

    def lives(self, pid: int) -> bool:
        """Return whether a process runs here."""
        return Path(f"/proc/{pid}").exists()

    def take_turn(self, job: int) -> AbstractContextManager[object] | None:
        """Return what holds the turn among a job's supervised sruns on this machine while it is
        entered; None: another one has it. It ends with this process, however that ends.

        Args:
            job: job id.
        """
        # A name and no file: a file system of many machines may have no locks.
        turn = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            turn.bind(f"\0sres-turn-{self.uid}-{job}")
        except OSError:
            turn.close()
            return None
        return turn

    def connections(self, step: SrunStep) -> int:
        """Return how many connections an srun has; -1 where the kernel does not tell."""
        return connections(step.pid)

    def close_connections(self, step: SrunStep, address: str) -> None:
        """Close an srun's connections to one machine, as if that machine had closed them."""
        close_sockets(step.pid, address)

    def look_at_ports(self, nodes: Iterable[Node]) -> PortsSeen:
        """Connect to the slurmd of each node: `slurmd_port.look_at_ports`."""
        # Late: no step waits for what only a failed launch needs.
        from slurm_resilience.slurm.slurmd_port import look_at_ports

        return look_at_ports(nodes)

    def observe(
        self, rendezvous: Path, on_news: Callable[[], None]
    ) -> AbstractContextManager[Observer]:
        """Watch a training.

        Args:
            rendezvous: where it meets.
            on_news: called (in a thread) at each change.
        """
        # Late: no step waits for what only a training needs.
        from slurm_resilience.resume.observing import observe

        return observe(rendezvous, on_news)

    def start_thread(self, run: Callable[[], None], name: str) -> threading.Thread:
        """Run something beside the supervisor's own loop."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread
