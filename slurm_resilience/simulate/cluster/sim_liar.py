"""A simulated user whose program claims jobs, nodes and steps that are not its own."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Protocol

from slurm_resilience.errors import SresError
from slurm_resilience.simulate.cluster.rules.cluster_rules import ClusterRules
from slurm_resilience.simulate.cluster.sim_machine import SimClient, WireEnd
from slurm_resilience.simulate.cluster.sim_slurm import SimSlurm
from slurm_resilience.simulate.schedule import Schedule
from slurm_resilience.wire.messages import (
    AttemptEnded,
    AttemptStarted,
    Beat,
    BreakerReset,
    Goodbye,
    Hello,
    Message,
    NodeHello,
    PauseRequest,
    Refused,
    Report,
    RequeueRequest,
    Role,
)

LIAR = 2000
"""The uid of the user who lies: no job of the others is its own."""
ADDRESS = "192.0.2.250"
SECONDS = 150.0
"""Time over which the lies are told."""
COMPANIONS = 12
"""So often the user submits jobs that are called companions."""
UNKNOWN_NODES = ("n999", "", "n1,n2", "../n1")


class LiarsWorld(Protocol):
    """A simulated cluster, as its liar sees it."""

    schedule: Schedule
    slurm: SimSlurm
    endpoint: WireEnd
    rules: ClusterRules


class SimLiar:
    """The program. It runs in a job of its own, which Slurm started."""

    def __init__(self, world: LiarsWorld, random: Random) -> None:
        self._world = world
        self._random = random
        self._own = world.slurm.submit(
            random.choice((1, 1, 2)),
            uid=LIAR,
            requeue=random.random() < 0.5,
            no_kill=random.random() < 0.5,
            exclusive=random.random() < 0.5,
            seconds=random.uniform(60.0, 400.0),
            step=False,
        )
        self._connection: SimClient | None = None
        self._heard: list[Message] = []

    def begin(self, lies: int) -> None:
        """Tell so many lies, spread over some time."""
        kinds: tuple[Callable[[], None], ...] = (
            self._claim_nodes,
            self._claim_nodes,
            self._claim_a_connection,
            self._speak_as_a_node,
            self._order,
            self._ask_for_a_requeue,
            self._end,
        )
        for _ in range(lies):
            at = self._random.random() * SECONDS
            self._world.schedule.after(at, self._random.choice(kinds))
        for number in range(COMPANIONS):
            self._world.schedule.after(SECONDS * number / COMPANIONS, self._forge_a_companion)

    # -- lies ---------------------------------------------------------------------------------

    def _claim_nodes(self) -> None:
        """Say that the job's step runs on nodes that are not the job's, or do not exist."""
        names = sorted(self._world.slurm.entries)
        claimed = self._random.sample(names, self._random.randint(1, len(names)))
        claimed += self._random.choices(UNKNOWN_NODES, k=3)
        times = self._random.choice((1, 1, 3))
        message = AttemptStarted(self._random.randint(0, 9), tuple(claimed) * times, "1.0")
        if self._say(message):
            self._world.rules.announced(self._own)

    def _claim_a_connection(self) -> None:
        """Say to be a node, or another user's job."""
        slurm, random = self._world.slurm, self._random
        jobs = [job for name in slurm.entries for job in slurm.jobs_on(name) if job.uid != LIAR]
        if jobs and random.random() < 0.5:
            self._connects("job", str(random.choice(jobs).id))
        else:
            self._connects("node", random.choice(sorted(slurm.entries)))

    def _connects(self, role: Role, subject: str) -> None:
        endpoint = self._world.endpoint
        if not endpoint.serves:
            return
        try:
            endpoint.authorize(Hello(b"", role, subject), LIAR, ADDRESS)
        except SresError:
            return
        self._world.rules.let_through(f"uid {LIAR} speaks for the {role} {subject}")

    def _speak_as_a_node(self) -> None:
        """Send what only a node's sresd may send."""
        message = self._random.choice((Beat(1), NodeHello("b", "i"), Report(full=True), Goodbye()))
        if self._say(message):
            self._world.rules.let_through(f"a job sends a {type(message).__name__}")

    def _order(self) -> None:
        """Order what only an administrator may order."""
        order = self._random.choice((PauseRequest("mine"), PauseRequest(""), BreakerReset()))
        self._heard.clear()
        if self._say(order) and not any(isinstance(said, Refused) for said in self._heard):
            self._world.rules.let_through(f"uid {LIAR} sends a {type(order).__name__}")

    def _ask_for_a_requeue(self) -> None:
        if self._say(RequeueRequest("a node\nof mine died")):
            self._world.rules.announced(self._own)  # it may speak for its own job

    def _end(self) -> None:
        outcome = self._random.choice(("stop: done", "requeue", "\n" * 9, "x" * 2000))
        self._say(AttemptEnded(self._random.randint(0, 9), self._random.randint(-1, 300), outcome))

    def _forge_a_companion(self) -> None:
        """Submit jobs whose names say that they are other users' companions, or another run's."""
        slurm = self._world.slurm
        jobs = {job.id: job for name in slurm.entries for job in slurm.jobs_on(name)}
        for job in jobs.values():
            restarts = job.restarts if job.uid != LIAR else job.restarts + 1
            slurm.submit(
                1,
                uid=LIAR,
                requeue=False,
                seconds=1.0,
                step=False,
                companion_of=(job.id, restarts),
                delay=SECONDS / COMPANIONS,
            )

    # -- the wire -----------------------------------------------------------------------------

    def _say(self, message: Message) -> bool:
        """Send a message; tell whether sresctld took it."""
        endpoint = self._world.endpoint
        connection = self._connect()
        if connection is None:
            return False
        try:
            endpoint.received(connection, message)
        except SresError:
            endpoint.closed(connection)
            self._connection = None
            return False
        return True

    def _connect(self) -> SimClient | None:
        """Return the connection of the program's own job, where it has one."""
        endpoint, known = self._world.endpoint, self._connection
        if not endpoint.serves or self._world.slurm.find_job(self._own) is None:
            return None
        if known is not None and known.generation == endpoint.generation:
            return known
        try:
            endpoint.authorize(Hello(b"", "job", str(self._own)), LIAR, ADDRESS)
        except SresError:
            return None
        connection = SimClient("job", str(self._own), LIAR, endpoint.generation, self._heard.append)
        self._connection = connection
        endpoint.opened(connection)
        return connection
