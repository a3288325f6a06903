"""The messages between sresctld, sresd, the supervisor and `sres`. Pure.

msgspec tagged structs in msgpack. Unknown fields are ignored (a newer sresd may say more), unknown
messages are refused. A report carries no node name: the connection's identity is the node.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from slurm_resilience.model import CheckResult, Finding
from slurm_resilience.wire.frames import FrameCodec

MAX_FRAME_BYTES = 8 << 20
"""Bytes of the largest message of all: a page of `Status` in which every node has many findings."""
MAX_UNPROVEN_FRAME_BYTES = 16 << 10
"""Bytes accepted from a client for which munge has not vouched yet."""

PROTOCOL = 4
"""Raised with every change that another version would not understand: it is refused, by name."""

Role = Literal["node", "job", "query", "standby"]

MAX_FRAME_BYTES_OF: Mapping[Role, int] = {
    "node": 4 << 20,  # a full report: 500 findings with their evidence
    "job": 512 << 10,  # the names of 10,000 nodes
    "query": 16 << 10,
    "standby": 16 << 10,
}
"""Bytes that sresctld accepts in one frame of each role."""


def other_protocol(other: int) -> str:
    """Return what to tell when the other side speaks another protocol."""
    return (
        f"protocol {other} is spoken there, {PROTOCOL} here: install the same version of "
        "slurm-resilience on both"
    )


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """sresctld opens the handshake with this."""

    nonce: bytes
    uid: int = -1
    """sresctld's user: the caller's credential will be readable to this user alone."""
    protocol: int = PROTOCOL


class Proof(msgspec.Struct, frozen=True):
    """The content of the caller's munge credential."""

    nonce: bytes
    """sresctld's: it ties the credential to this connection."""
    role: str
    subject: str
    key: bytes
    """New for this connection, and known to sresctld alone besides."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The caller answers the challenge with its proven identity."""

    credential: bytes
    """munge over a `Proof`, for sresctld's user, with the same role and subject as here."""
    role: Role
    subject: str
    """The node's name, the job id, or empty."""
    protocol: int = PROTOCOL


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """sresctld proves that it could read the credential. All later frames are sealed."""

    proof: bytes
    """The seal of ``peers``, made with the key of the `Proof`."""
    peers: tuple[str, ...] = ()
    """`address:port` of other nodes' slurmds: a node that reaches none of them is cut off."""
    light_beats: bool = False
    """sresctld takes a `Beat` also as a mark (`wire/seal.py`). An older one does not say so, and an
    older sresd does not read it; both go on with sealed beats. It needs no seal: it is no secret,
    and a lie about it can only end the connection, as each program in between can."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The reason why the connection ends, or why a request was not done."""

    reason: str
    code: int = 7


class NodeHello(msgspec.Struct, frozen=True, tag=True):
    """sresd's first message after the welcome."""

    boot_id: str
    """Changes with every boot (and every replacement)."""
    instance: str = ""
    """Identity of the machine itself: a serial number or an instance id. Changes when replaced."""
    version: str = ""
    drivers: tuple[str, ...] = ()
    """Drivers of accelerators and of the fabric, each with its version, as sresd found them when it
    started."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """sresd is alive."""

    seq: int


class Report(msgspec.Struct, frozen=True, tag=True):
    """Results of checks, and findings of the kernel log as they arrive."""

    results: tuple[CheckResult, ...] = ()
    findings: tuple[Finding, ...] = ()
    cleared: tuple[tuple[str, str, str], ...] = ()
    """Keys of findings that no longer hold."""
    full: bool = False
    """The first report of a connection: everything that holds; what is not in it no longer does."""
    checked: bool = False
    """Each check has run once since this sresd started; a run that could not tell counts. An older
    sresd never says so: its node is not given back after a repair, and is left to a person."""


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """sresd is stopped on purpose: its silence from now on is no sign of a fault."""

    reason: str = ""


class NodeRequest(msgspec.Struct, frozen=True, tag=True):
    """sresctld asks a node's sresd. The question is packed by itself: sresd refuses a kind that it
    does not know, and lives on."""

    id: int
    kind: str
    seconds: float
    """Until an answer is of no use any more."""
    body: msgspec.Raw
    """One of the questions below."""


class NodeAnswer(msgspec.Struct, frozen=True, tag=True):
    """sresd answers a `NodeRequest`."""

    id: int
    body: msgspec.Raw = msgspec.Raw(b"\xc0")
    refused: str = ""
    """The reason why there is no answer."""


class SendLog(msgspec.Struct, frozen=True):
    """A question: the last lines of sresd's own log, and the kernel log's findings."""

    kind: ClassVar[str] = "send-log"
    lines: int = 100
    max_bytes: int = 64 << 10


class LogTail(msgspec.Struct, frozen=True):
    """The answer to `SendLog`."""

    lines: tuple[str, ...]
    findings: tuple[Finding, ...]
    """Those that hold now."""


class SendEvidence(msgspec.Struct, frozen=True):
    """A question: everything that may explain a fault, before the machine is given away."""

    kind: ClassVar[str] = "send-evidence"
    max_bytes: int = 256 << 10
    """Limit of each log by itself."""


class NodeEvidence(msgspec.Struct, frozen=True):
    """The answer to `SendEvidence`. Logs are oldest line first."""

    kernel_log: tuple[str, ...]
    journal: tuple[str, ...]
    """The machine's own (journalctl); empty where there is none."""
    sresd_log: tuple[str, ...]
    findings: tuple[Finding, ...]
    """The kernel log's that hold now."""
    results: tuple[CheckResult, ...]
    """The last result of each check."""
    tools: Mapping[str, str] = {}
    """The output of the tools of its GPUs, by name."""
    bug_report: str = ""
    """The place of the report of NVIDIA's own tool, or that it is being written; empty: there is no
    such tool."""
    bug_report_runs: bool = False


class AwaitBugReport(msgspec.Struct, frozen=True):
    """A question: the place of the bug report, once it is there."""

    kind: ClassVar[str] = "await-bug-report"
    seconds: float
    """The node answers after that at the latest."""


class BugReportTold(msgspec.Struct, frozen=True):
    """The answer to `AwaitBugReport`."""

    text: str


class EndLeftOver(msgspec.Struct, frozen=True):
    """A question, and an order: end the processes of jobs that are over."""

    kind: ClassVar[str] = "end-left-over"
    jobs: tuple[int, ...] = ()
    """Jobs that are not over: theirs stay."""


class LeftOverEnded(msgspec.Struct, frozen=True):
    """The answer to `EndLeftOver`: processes, each in words."""

    ended: tuple[str, ...]
    left: tuple[str, ...]
    """Those that live on."""


class ResetGpus(msgspec.Struct, frozen=True):
    """A question, and an order: reset the GPUs with a finding that asks for it, if nothing runs on
    the node. The same order is carried out once, and answered in the same way once more."""

    kind: ClassVar[str] = "reset-gpus"
    order: str
    """Names the try: incident and attempt."""
    seconds: float
    """Until the answer is due."""


class GpusReset(msgspec.Struct, frozen=True):
    """The answer to `ResetGpus`."""

    is_well: bool
    """They were reset, answer, and nothing is found on them any more."""
    text: str


class RunCheck(msgspec.Struct, frozen=True):
    """A question: the result of one check, run now."""

    kind: ClassVar[str] = "run-check"
    check: str


class RunChecks(msgspec.Struct, frozen=True):
    """A question: the results of several checks, run now."""

    kind: ClassVar[str] = "run-checks"
    only: tuple[str, ...] = ()
    """Their names; none: all but those that take long, and what the kernel log has told."""
    seconds: float = 60.0
    """For all of them together; what is not over by then is unjudged."""


class ChecksRun(msgspec.Struct, frozen=True):
    """The answer to `RunChecks`."""

    results: tuple[CheckResult, ...]


class RunStepChecks(msgspec.Struct, frozen=True):
    """A question: run the checks that may take the node out of service, since a step has failed on
    it. Their results come as a report, before the answer."""

    kind: ClassVar[str] = "run-step-checks"
    seconds: float
    """Until the answer is due; what is not over by then is reported later."""


class StepChecksRun(msgspec.Struct, frozen=True):
    """The answer to `RunStepChecks`."""

    checks: int
    """Those that were run."""
    unjudged: tuple[str, ...] = ()
    """Those that could not tell, or have no result yet."""


class ChangeDrill(msgspec.Struct, frozen=True):
    """A question, and perhaps an order: during a drill the lines count that programs write into the
    node's kernel log."""

    kind: ClassVar[str] = "drill"
    change: Literal["none", "open", "close"] = "none"
    seconds: float = 0.0
    """The length of the drill that is opened."""


class DrillAnswer(msgspec.Struct, frozen=True):
    """The answer to `ChangeDrill`."""

    seconds_left: float
    """0: no drill is open."""
    is_always: bool = False
    """Such lines count without a drill as well (agent.accept_injected)."""


class RunLifecycle(msgspec.Struct, frozen=True):
    """A question, and an order: run the node's lifecycle scripts once more."""

    kind: ClassVar[str] = "run-lifecycle"
    seconds: float = 550.0
    """Until the asker gives up waiting; the scripts go on."""


class ScriptEnd(msgspec.Struct, frozen=True):
    """The end of one lifecycle script."""

    name: str
    rc: int | None
    """None: it was skipped."""
    seconds: float
    text: str = ""
    """The last line that it printed."""


class LifecycleEnd(msgspec.Struct, frozen=True):
    """The answer to `RunLifecycle`."""

    is_well: bool
    """All scripts ended well, and slurmd was started."""
    text: str = ""
    """The trouble; empty: there is none."""
    scripts: tuple[ScriptEnd, ...] = ()
    output: tuple[str, ...] = ()
    """The last lines of the script that failed."""


class NodeQuestion(msgspec.Struct, frozen=True, tag=True):
    """root or SlurmUser has sresctld ask a node; the answer is a `NodeAnswer`."""

    node: str
    kind: str
    body: msgspec.Raw
    seconds: float = 10.0


RESIZE = "resize"
"""The kind of question that a `ResizeOrder` is."""


class ResizeRequest(msgspec.Struct, frozen=True, tag=True):
    """A job's owner, root or SlurmUser asks for another number of nodes of its elastic step; the
    answer is the supervisor's `NodeAnswer`, with a `ResizeTaken`."""

    job: int
    nodes: int


class ResizeOrder(msgspec.Struct, frozen=True):
    """The same for the supervisor, in a `NodeRequest`; sresctld knows who asks."""

    nodes: int
    uid: int


class ResizeTaken(msgspec.Struct, frozen=True):
    """The target that a supervisor has from now on, and the one before."""

    nodes: int
    before: int


class AttemptStarted(msgspec.Struct, frozen=True, tag=True):
    """A supervisor keeps this job's step alive, and the step now runs on these nodes."""

    attempt: int
    nodes: tuple[str, ...]
    step: str = ""


class AttemptEnded(msgspec.Struct, frozen=True, tag=True):
    attempt: int
    exit_code: int
    outcome: str
    """The supervisor's next step, with its reason, in one line."""


class RequeueRequest(msgspec.Struct, frozen=True, tag=True):
    """A supervisor asks to have its job requeued and started at once: nothing else helps."""

    reason: str


class WrongResults(msgspec.Struct, frozen=True, tag=True):
    """A supervisor's training found that a rank on this node had other parameters than most of its
    replicas."""

    node: str
    text: str


class LeftNode(msgspec.Struct, frozen=True, tag=True):
    """A supervisor's step has left a node on which its attempts ended, though no fault is known."""

    node: str
    text: str
    goes_on: bool = False
    """It has gone on without the node since, further or for longer than the attempts that ended
    there: the node was at fault, and not the program."""


class EvidenceRequest(msgspec.Struct, frozen=True, tag=True):
    """The supervisor asks whether anything is known about these nodes."""

    nodes: tuple[str, ...]
    check_seconds: float = 0.0
    """A step has failed on them: they are to check themselves, and what they find is to be told
    within this time. 0: only what is known already."""


class NodeVerdict(msgspec.Struct, frozen=True, gc=False):
    """sresctld's knowledge of a node of the job."""

    node: str
    verdict: Literal["healthy", "unknown", "suspect", "dead", "sick", "requested"]
    reason: str
    action: str = ""
    incident: int = 0
    at: float = 0.0


class Evidence(msgspec.Struct, frozen=True, tag=True):
    """The answer to an `EvidenceRequest`, and what is sent unasked when a node turns bad."""

    verdicts: tuple[NodeVerdict, ...]
    asked: bool = False
    checks: Literal["", "running", "over"] = ""
    """The checks that were asked for: these verdicts come before them, or know what they found."""
    text: str = ""
    """The outcome of these checks, in one line."""


class PauseRequest(msgspec.Struct, frozen=True, tag=True):
    """An administrator pauses sresctld or, without a reason, lets it go on."""

    reason: str = ""


class BreakerReset(msgspec.Struct, frozen=True, tag=True):
    """An administrator has looked at the faults that tripped the breaker: they count no more."""


class SparesResume(msgspec.Struct, frozen=True, tag=True):
    """An administrator lets sresctld go on with the spares that people have changed."""


class JournalRecord(msgspec.Struct, frozen=True):
    """One transaction of the active sresctld's journal."""

    number: int
    statements: tuple[tuple[str, tuple[tuple[Any, ...], ...]], ...]
    """Each with its rows of values."""


class StandbyHello(msgspec.Struct, frozen=True, tag=True):
    """The standby's first message: how far its copy of the journal has come."""

    history: str
    position: int


class JournalHead(msgspec.Struct, frozen=True, tag=True):
    """The answer: the journal of the side that was called, and what that side does."""

    host: str
    history: str
    position: int
    is_active: bool
    """False: it does nothing, and begins nothing before it has looked at the caller's journal."""


class JournalCopy(msgspec.Struct, frozen=True, tag=True):
    """A part of a copy of the whole journal."""

    history: str
    position: int
    part: bytes
    left: int
    """Bytes that follow in later parts."""


class JournalRecords(msgspec.Struct, frozen=True, tag=True):
    """Records that follow those that are known; empty: a sign of life."""

    records: tuple[JournalRecord, ...] = ()


class JournalAck(msgspec.Struct, frozen=True, tag=True):
    """The standby has written all up to this number to its disk, or one more part of a copy."""

    position: int


class StatusRequest(msgspec.Struct, frozen=True, tag=True):
    """Ask for what sresctld knows: all of it in pages, the part without nodes and jobs, or the
    newest of the journal, in pages too: a node's events, events and incidents by what the next
    fields say, and faults that are only observed."""

    what: Literal["status", "summary", "history", "events", "incidents", "review"]
    node: str = ""
    """A node; for events and incidents a hostlist. Empty: all."""
    limit: int = 100
    after: str = ""
    """The last page's `Status.next`; empty: the first page."""
    kinds: tuple[str, ...] = ()
    """Events of these kinds. Empty: of all."""
    job: int = 0
    incident: int = 0
    since: float = 0.0
    """Events from this moment on (epoch)."""
    is_open: bool = False
    """Incidents that are under way."""


class Status(msgspec.Struct, frozen=True, tag=True):
    data: dict[str, Any]
    next: str = ""
    """Ask again with this for the next page; empty: this was the last one."""


Message = (
    Challenge
    | Hello
    | Welcome
    | Refused
    | NodeHello
    | Beat
    | Report
    | Goodbye
    | NodeRequest
    | NodeAnswer
    | NodeQuestion
    | ResizeRequest
    | AttemptStarted
    | AttemptEnded
    | RequeueRequest
    | WrongResults
    | LeftNode
    | EvidenceRequest
    | Evidence
    | PauseRequest
    | BreakerReset
    | SparesResume
    | StandbyHello
    | JournalHead
    | JournalCopy
    | JournalRecords
    | JournalAck
    | StatusRequest
    | Status
)

FRAMES: FrameCodec[Message] = FrameCodec(Message, MAX_FRAME_BYTES)
