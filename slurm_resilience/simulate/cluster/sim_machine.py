"""Simulated nodes: power, boots, hardware, sresd and its connection, and the network to them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from random import Random

import msgspec

from slurm_resilience.agent.outbox import Outbox
from slurm_resilience.health.grouping import FindingGroup, GroupingChange, absorb, heals
from slurm_resilience.model import FAULTY, CheckResult, Finding, Severity
from slurm_resilience.simulate.cluster.sim_clock import EPOCH_SECONDS
from slurm_resilience.simulate.schedule import Schedule
from slurm_resilience.wire.messages import (
    Beat,
    Goodbye,
    GpusReset,
    Hello,
    Message,
    NodeAnswer,
    NodeHello,
    NodeRequest,
    Report,
    ResetGpus,
    Role,
)
from slurm_resilience.wire.server import Client

XIDS = {
    Severity.RESET: ("46", "GPU stopped processing"),
    Severity.REBOOT: ("95", "uncontained memory error"),
    Severity.REPLACE: ("79", "GPU has fallen off the bus"),
}
"""By what they ask for: what a reset mends, what a reboot mends, and what neither does."""
GPU = "0000:3b:00"
RESET_SECONDS = (2.0, 8.0, 40.0)
BEAT = Beat(1)
OLD_DRIVER, NEW_DRIVER = "driver 1.9", "driver 2.0"
"""Few machines have the new one."""
GPU_CHECK = "gpus"
"""The health check of every simulated sresd."""
CHECK_SECONDS = (0.3, 2.0, 20.0)
"""Until that has run once."""
UNACKED_SECONDS = 3.0
"""A connection whose bytes are not confirmed for this long is given up by sresd."""
KEEPALIVE_SECONDS = 25.0
"""Until sresctld's side of a connection notices that the machine behind it is gone."""
MAX_BACKOFF_SECONDS = 5.0


class Power(enum.Enum):
    """The stage that a machine's boot has reached."""

    OFF = "off"
    BOOTING = "booting"
    ON = "on"


class Path(enum.Enum):
    """A direction of the network that can be cut by itself."""

    BEATS = "sresd to sresctld"
    PROBES = "sresctld to slurmd"
    SLURM = "slurmctld and slurmd"


ALL_PATHS = frozenset(Path)


class WireEnd:
    """sresctld's side of the wire, which may be down."""

    def __init__(self) -> None:
        self.authorize: Callable[[Hello, int, str], tuple[str, ...]] = lambda *_: ()
        self.opened: Callable[[Client], None] = lambda _: None
        self.received: Callable[[Client, Message], None] = lambda *_: None
        self.closed: Callable[[Client], None] = lambda _: None
        self.serves = False
        self.generation = 0
        """Counts the starts of sresctld: connections of an earlier one are dead."""


class SimClient(Client):
    """A proven connection, without a socket."""

    def __init__(
        self, role: Role, subject: str, uid: int, generation: int, hear: Callable[[Message], None]
    ) -> None:
        self.role = role
        self.subject = subject
        self.uid = uid
        self.address = ""
        self.generation = generation
        self._hear = hear

    def send(self, message: Message) -> None:
        self._hear(message)

    def close(self) -> None:
        return

    def call_later(self, *_: object) -> None:
        """Forget it: sresctld waits for no answer for longer than its own limit."""


class SimMachine:
    """One node's machine. Its agent beats while it runs and reaches sresctld."""

    def __init__(
        self,
        name: str,
        schedule: Schedule,
        endpoint: WireEnd,
        random: Random,
        contact: Callable[[str, bool], None],
        registers: Callable[[str, bool], None],
    ) -> None:
        """
        Args:
            name: the node's.
            schedule: the simulated time.
            endpoint: sresctld's.
            random: for the times of boots and connections.
            contact: is told whether slurmctld reaches slurmd.
            registers: is told of slurmd's registration, and whether it is after a boot.
        """
        self.name = name
        self._schedule = schedule
        self._endpoint = endpoint
        self._random = random
        self._contact = contact
        self._registers = registers
        self.power = Power.ON
        self.boots = 1
        self.serial = 1
        self.is_lemon = False
        """Each repair brings this machine back, and mends nothing for long."""
        self.cut: set[Path] = set()
        self.fault: Severity | None = None
        """The hardware's fault: it shows in each boot, until the machine is replaced (or, where it
        asks for a reboot, until one)."""
        self.seen_at = 0.0
        """When it last gave sresctld a sign of life: a beat, or the answer to a probe."""
        self.answers_since = 0.0
        """Since when it answers probes, while it does."""
        self.agent = Agent(self)

    # -- facts --------------------------------------------------------------------------------

    @property
    def lives(self) -> bool:
        return self.power is Power.ON

    def reaches(self, path: Path) -> bool:
        return self.lives and path not in self.cut

    @property
    def schedule(self) -> Schedule:
        return self._schedule

    @property
    def endpoint(self) -> WireEnd:
        return self._endpoint

    @property
    def random(self) -> Random:
        return self._random

    @property
    def boot_id(self) -> str:
        return f"{self.name}-boot{self.serial}.{self.boots}"

    @property
    def instance(self) -> str:
        return f"{self.name}-machine{self.serial}"

    # -- power --------------------------------------------------------------------------------

    def power_off(self) -> None:
        """Lose all power at once: no FIN, no goodbye."""
        if self.power is Power.OFF:
            return
        self.agent.beat()  # all until now has arrived
        self.power = Power.OFF
        self.agent.vanish()
        self._contact(self.name, False)

    def boot(self, seconds: float, *, replaced: bool = False) -> None:
        """Come up after so long, as the same machine or as another one."""
        self.power_off()
        self.power = Power.BOOTING
        if replaced:
            self.fault = None
        if replaced and not self.is_lemon:
            self.serial += 1
            self.boots = 0
        self.boots += 1
        self._schedule.after(seconds, self._up, self.boot_id)

    def _up(self, boot_id: str) -> None:
        if self.power is not Power.BOOTING or boot_id != self.boot_id:
            return
        self.power = Power.ON
        self.answers_since = self._schedule.now
        if self.fault in (Severity.RESET, Severity.REBOOT):
            self.fault = None
        if Path.SLURM not in self.cut:
            self._registers(self.name, True)
        self.agent.start(self._random.uniform(0.2, 3.0))
        if self.fault is not None:
            # The driver finds the fault again at its first touch, before or after sresd speaks.
            self._schedule.after(
                self._random.choice((0.0, 1.0, 5.0)), self.agent.find, self.fault, boot_id
            )

    def break_down(self, severity: Severity) -> None:
        """Have a fault of the hardware that the kernel log shows."""
        if self.lives:
            self.fault = severity
            self.agent.find(severity, self.boot_id)

    # -- network ------------------------------------------------------------------------------

    def cut_off(self, paths: frozenset[Path], seconds: float) -> None:
        """Cut some directions for a time."""
        self.agent.beat()
        self.cut |= paths
        if Path.SLURM in paths:
            self._contact(self.name, False)
        if Path.BEATS in paths:
            self.agent.lose_path()
        self._schedule.after(seconds, self._mend, paths)

    def _mend(self, paths: frozenset[Path]) -> None:
        self.cut -= paths
        if Path.PROBES in paths:
            self.answers_since = self._schedule.now
        if Path.SLURM in paths and self.lives:
            self._contact(self.name, True)
        if Path.BEATS in paths:
            self.agent.regain_path()


class Presence(enum.Enum):
    """The stage of a node's sresd."""

    RUNS = "runs"
    GONE = "does not run"


class Agent:
    """A node's sresd: it connects, says hello, reports, and beats when it is asked to."""

    def __init__(self, machine: SimMachine) -> None:
        self._machine = machine
        self.presence = Presence.RUNS
        self.drivers: tuple[str, ...] = ()
        """Those of the machine, each with its version."""
        self.connection: SimClient | None = None
        self.connected_at = 0.0
        self._cut_at = 0.0
        self._dialing = 0
        self._groups: tuple[FindingGroup, ...] = ()
        self._process = 0
        """Counts the starts of sresd."""
        self.has_looked = True
        """In this boot its check has run."""
        self._outbox = self._new_outbox()
        self._outbox.result(CheckResult(GPU_CHECK, "pass", "all are there"))
        self.reported_at: dict[tuple[str, str, str], float] = {}
        """When sresctld was told of each finding of this boot, or of its return."""
        self._told: dict[tuple[str, str, str], float] = {}
        """The time of each finding that was told."""
        self.resets: dict[str, GpusReset] = {}
        """The orders to reset its GPU that sresd has carried out, and how each ended."""
        self.on_reset: Callable[[str, str], None] = lambda *_: None
        """Is told of each reset: the node and the order."""

    def start(self, seconds: float) -> None:
        """Start, and connect after so long."""
        self.presence = Presence.RUNS
        self._begin(seconds)

    def _new_outbox(self, *known: Finding) -> Outbox:
        outbox = Outbox()
        outbox.expect((GPU_CHECK,))
        for finding in known:
            outbox.change(GroupingChange((), finding))
        return outbox

    def _begin(self, seconds: float) -> None:
        """Start the process: it reads the kernel log, connects, and runs its check."""
        self._outbox = self._new_outbox(*self._outbox.kernel_findings())
        self._process += 1
        # Of its own: a seed's other faults stay the same.
        random = Random(f"{self._machine.boot_id}/{self._process}")
        lasts = seconds + random.choice(CHECK_SECONDS)
        self._machine.schedule.after(lasts, self._look, self._process, self._machine.boot_id)
        self._dial_after(seconds)

    def _look(self, process: int, boot_id: str) -> None:
        """Run the check to its end."""
        machine = self._machine
        is_this_one = (process, boot_id) == (self._process, machine.boot_id)
        if not is_this_one or not machine.lives or self.presence is Presence.GONE:
            return
        if machine.fault is not None and not self._groups:
            self.find(machine.fault, boot_id)
        self.has_looked = True
        self._outbox.result(CheckResult(GPU_CHECK, "pass", "all are there"))
        self._tell_news()

    def _tell_news(self) -> None:
        connection = self.connection
        if connection is not None and self.speaks:
            self._tell(connection, self._outbox.take())

    def stop(self) -> None:
        """Say goodbye and end, as at a package upgrade."""
        connection = self.connection
        if connection is not None and self._is_open() and self._machine.reaches(Path.BEATS):
            self._machine.endpoint.received(connection, Goodbye("sresd stops"))
            self._machine.endpoint.closed(connection)
        self.connection, self.presence = None, Presence.GONE

    def crash(self, seconds: float) -> None:
        """Die without a word, and be started again by systemd."""
        self._drop()
        self._begin(seconds)

    def vanish(self) -> None:
        """Lose the machine."""
        connection, self.connection = self.connection, None
        self.presence = Presence.GONE
        self._outbox, self._groups = self._new_outbox(), ()
        self.has_looked = False
        self.reported_at.clear()
        if connection is not None:
            self._machine.schedule.after(KEEPALIVE_SECONDS, self._late_end, connection)

    def lose_path(self) -> None:
        """Notice nothing yet."""
        self._cut_at = self._machine.schedule.now

    def regain_path(self) -> None:
        """Send on, on the old connection or on a new one."""
        machine = self._machine
        if not machine.lives or self.presence is Presence.GONE:
            return
        if machine.schedule.now - self._cut_at >= UNACKED_SECONDS or not self._is_open():
            self.connection = None
            self._dial_after(machine.random.uniform(0.1, 2.5))
        else:
            self._tell_news()

    def sresctld_started(self) -> None:
        """Knock again, as all nodes do after a restart of sresctld."""
        if self.presence is Presence.RUNS and self._machine.lives:
            self._dial_after(self._machine.random.uniform(0.1, MAX_BACKOFF_SECONDS))

    def beat(self) -> None:
        """Send a beat, if the path allows it."""
        connection, machine = self.connection, self._machine
        if connection is not None and machine.reaches(Path.BEATS) and self._is_open():
            machine.seen_at = machine.schedule.now
            machine.endpoint.received(connection, BEAT)

    def has_spoken_since(self, moment: float) -> bool:
        """Tell whether all its beats since then have arrived."""
        return self.speaks and max(self.connected_at, self._cut_at) <= moment

    def find(self, severity: Severity, boot_id: str) -> None:
        """Read a line of the kernel log, and report it."""
        if boot_id != self._machine.boot_id or not self._machine.lives:
            return
        code, meaning = XIDS[severity]
        text, at = f"Xid {code}: {meaning}", EPOCH_SECONDS + self._machine.schedule.now
        finding = Finding("xid", severity, text, at, GPU, code)
        change = absorb(self._groups, finding)
        self._groups = change.incidents
        self._outbox.change(change)
        self._tell_news()

    def _tell(self, connection: SimClient, report: Report | None) -> None:
        """Send the outbox's news."""
        if report is None:
            return
        self._machine.endpoint.received(connection, report)
        # A full report takes the place of all before it: a sresd that was stopped in mid-reset has
        # told of no end.
        told = {found.key for found in report.findings}
        silent = [key for key in self.reported_at if report.full and key not in told]
        for key in (*report.cleared, *silent):
            self.reported_at.pop(key, None)
        now = self._machine.schedule.now
        for found in report.findings:
            if not report.full or self._told.get(found.key) != found.at:
                self.reported_at[found.key] = now
            self._told[found.key] = found.at

    @property
    def speaks(self) -> bool:
        """Tell whether its beats arrive."""
        return self._is_open() and self._machine.reaches(Path.BEATS)

    def _is_open(self) -> bool:
        connection, endpoint = self.connection, self._machine.endpoint
        return (
            connection is not None
            and endpoint.serves
            and connection.generation == endpoint.generation
        )

    def _drop(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None and self._machine.reaches(Path.BEATS):
            self._machine.endpoint.closed(connection)

    def _late_end(self, connection: SimClient) -> None:
        if connection.generation == self._machine.endpoint.generation:
            self._machine.endpoint.closed(connection)

    def _dial_after(self, seconds: float) -> None:
        self._dialing += 1
        self._machine.schedule.after(seconds, self._dial, self._dialing)

    def _hear(self, message: Message) -> None:
        """Answer a question, if this machine can: it resets its GPU, and has nothing to tell."""
        connection = self.connection
        is_reset = isinstance(message, NodeRequest) and message.kind == ResetGpus.kind
        if isinstance(message, NodeRequest) and is_reset and connection is not None:
            self._reset(connection, message)
        elif isinstance(message, NodeRequest) and connection is not None:
            answer = NodeAnswer(message.id, refused="nothing to tell")
            self._machine.schedule.after(0.1, self._answer, connection, answer)

    def _reset(self, connection: SimClient, request: NodeRequest) -> None:
        """Reset the GPU, once for each order: it helps, or not, or sresd dies over it."""
        machine = self._machine
        asked = msgspec.msgpack.decode(request.body, type=ResetGpus)
        random = Random(f"{machine.instance}/{asked.order}")
        seconds, chance = random.choice(RESET_SECONDS), random.random()
        if asked.order in self.resets:
            seconds = 0.1
        elif not any(one.severity is Severity.RESET for one in self._outbox.holding()):
            answer = NodeAnswer(request.id, refused="no GPU asks for it")
            machine.schedule.after(0.1, self._answer, connection, answer)
            return
        else:
            self.on_reset(machine.name, asked.order)
            self.resets[asked.order] = GpusReset(False, "sresd ended in the middle of the reset")
            if chance < 0.15:
                self.crash(seconds)
                return
            machine.schedule.after(seconds, self._was_reset, asked.order, chance, machine.boot_id)
        machine.schedule.after(seconds + 0.1, self._tell_reset, connection, request.id, asked.order)

    def _was_reset(self, order: str, chance: float, boot_id: str) -> None:
        machine = self._machine
        if not machine.lives or machine.boot_id != boot_id:
            return
        if chance < 0.4:
            self.resets[order] = GpusReset(False, "the GPU was not reset")
            return
        if machine.fault is Severity.RESET:
            machine.fault = None
        self._groups = tuple(one for one in self._groups if not heals(one.lead, GPU))
        self._outbox.change(GroupingChange(self._groups, recovered=GPU))
        self._tell_news()
        still = any(one.severity in FAULTY for one in self._outbox.holding())
        self.resets[order] = GpusReset(not still, "reset")

    def _tell_reset(self, connection: SimClient, number: int, order: str) -> None:
        body = msgspec.Raw(msgspec.msgpack.encode(self.resets[order]))
        self._answer(connection, NodeAnswer(number, body))

    def _answer(self, connection: SimClient, answer: NodeAnswer) -> None:
        machine, endpoint = self._machine, self._machine.endpoint
        if connection is self.connection and machine.lives and machine.reaches(Path.BEATS):
            endpoint.received(connection, answer)

    def _dial(self, number: int) -> None:
        machine, endpoint = self._machine, self._machine.endpoint
        if number != self._dialing or self.presence is Presence.GONE or not machine.lives:
            return
        if not endpoint.serves or not machine.reaches(Path.BEATS):
            self._dial_after(machine.random.uniform(0.5, MAX_BACKOFF_SECONDS))
            return
        connection = SimClient("node", machine.name, 0, endpoint.generation, self._hear)
        self.connection, self.connected_at = connection, machine.schedule.now
        endpoint.opened(connection)
        endpoint.received(
            connection, NodeHello(machine.boot_id, machine.instance, drivers=self.drivers)
        )
        self._tell(connection, self._outbox.take_all())
