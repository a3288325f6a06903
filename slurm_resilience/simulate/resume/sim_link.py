"""The link to a simulated sresctld, which judges nodes and requeues the job when it is asked to."""

from __future__ import annotations

from typing import Any

from slurm_resilience.errors import SlurmUnreachable
from slurm_resilience.resume.supervisor_link import SupervisorLink
from slurm_resilience.simulate.resume.resume_world import ResumeWorld
from slurm_resilience.simulate.resume.sim_nodes import NodeContact
from slurm_resilience.wire.messages import (
    AttemptEnded,
    AttemptStarted,
    Evidence,
    LeftNode,
    Message,
    NodeVerdict,
    Refused,
    RequeueRequest,
    ResizeOrder,
)

DEAD_SECONDS = 4.0
"""sresctld takes a node for dead that is silent for so long."""


class SimLink(SupervisorLink):
    """The real link without its thread: what it sends comes to the simulated sresctld."""

    def __init__(self, world: ResumeWorld, *, is_there: bool) -> None:
        super().__init__("sresctld", 1, world.job.id, "", frozenset())
        self._world = world
        if is_there:
            self.connected.set()

    def close(self) -> None:
        """End at once."""
        for end in self._bell:
            end.close()

    def send(self, message: Message) -> None:
        """Have sresctld hear a message, if it is there."""
        world = self._world
        if isinstance(message, LeftNode) and self.connected.is_set():
            world.node_named(message.node, message.goes_on)
        if isinstance(message, AttemptEnded):
            world.attempt_ended(message.outcome)
        if isinstance(message, RequeueRequest) and self.connected.is_set():
            world.requeue_asked(world.schedule.now)
            world.schedule.after(world.random.uniform(0.05, 2.0), self._requeue)

    def moved(self, message: AttemptStarted) -> None:
        """Announce other nodes; sresctld then tells what it knows of them."""
        super().moved(message)
        if self.connected.is_set():
            self.ask(message.nodes)

    def _hear(self, message: Message) -> None:
        """Hear a message now, or when the supervisor goes on."""
        world = self._world
        if world.schedule.now < world.supervisor.stopped_until:
            later = world.supervisor.stopped_until + world.random.uniform(0.1, 1.0)
            world.schedule.at(later, self._hear, message)
        else:
            super()._hear(message)

    def resize(self, nodes: int) -> bool:
        """Have a person's order for another number of nodes come through sresctld; return whether
        it was taken."""
        if not self.connected.is_set() or self._world.is_gone or self._resize is None:
            return False
        self._resize(ResizeOrder(nodes, self._world.job.uid))
        return True

    def suspect(self, name: str) -> None:
        """sresctld tells that a node has fallen silent: rightly, or not."""
        if self.connected.is_set() and not self._world.is_gone:
            self._hear(Evidence((NodeVerdict(name, "suspect", "no beat for 2 s"),)))

    def ask(self, nodes: tuple[str, ...]) -> None:
        """Have sresctld tell again what it knows."""
        for name in nodes:
            node = self._world.nodes[name]
            if node.contact is not NodeContact.FINE or node.shown.is_fail:
                delay = self._world.random.uniform(0.05, DEAD_SECONDS)
                self._world.schedule.after(delay, self.judge, name)

    def ask_checks(self, nodes: tuple[str, ...], seconds: float) -> None:
        """Have sresctld tell again what it knows: the simulated nodes have no checks."""
        self.ask(nodes)

    def doubts(self, nodes: tuple[str, ...]) -> dict[str, str]:
        """Return the nodes that are silent now, if sresctld is there; else its last words hold."""
        if not self.connected.is_set():
            return super().doubts(nodes)
        silent = [n for n in nodes if self._world.nodes[n].contact is not NodeContact.FINE]
        return dict.fromkeys(silent, "no beat for 2 s")

    def history(self) -> list[dict[str, Any]]:
        """Return nothing: the journal is not what is simulated."""
        raise SlurmUnreachable("sresctld does not answer")

    def judge(self, name: str) -> None:
        """sresctld tells what it finds of a node, and acts on a dead one."""
        world, node = self._world, self._world.nodes[name]
        if not self.connected.is_set() or world.is_gone:
            return
        if world.schedule.now < world.books.slurmctld_back:  # it marks first, and tells then
            world.schedule.at(world.books.slurmctld_back + 1.0, self.judge, name)
            return
        if node.contact is NodeContact.FINE:
            if node.shown.is_fail:
                self._hear(Evidence((NodeVerdict(name, "sick", "Xid 79"),)))
            return
        job = world.job
        leaves = name in job.nodes and name != job.batch_host and len(job.nodes) > 1
        last = world.sruns[-1].wanted if world.sruns else job.nodes
        shrinks = not job.gres or len(last) < len(job.nodes)
        if leaves and shrinks and not world.site.no_kill and job.state == "RUNNING":
            world.shrink(tuple(other for other in job.nodes if other != name))
            leaves = False
        self._hear(Evidence((NodeVerdict(name, "dead", "no beat for 4 s"),)))
        if not (leaves and job.gres and not world.site.no_kill):
            world.set_down(name, "Action:Replace")

    def _requeue(self) -> None:
        world = self._world
        if world.random.random() < 0.2:
            self._hear(Refused("the breaker is tripped"))
            world.seen.requeue_asked_at = None
            return
        if world.random.random() < 0.8:
            world.end_job("REQUEUED", requeue=True, word="DUE TO JOB REQUEUE")
