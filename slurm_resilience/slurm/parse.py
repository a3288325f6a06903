"""Text of Slurm's commands → the model. Pure.

Nodes come from `scontrol show node -o` (stable over 22.05, 24.11 and 26.05; only administrators
can write free text there). Jobs come from squeue with a format of our own whose separator is drawn
anew for each call: users choose a job's account and quality of service where Slurm does not check
them, with ``|`` and line ends, and nothing that a user writes may become a fact, or blind us.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from slurm_resilience.errors import SlurmError
from slurm_resilience.model import Job, Node
from slurm_resilience.slurm.client import ClusterInfo, StepInfo
from slurm_resilience.slurm.command_words import JOB_FIELDS
from slurm_resilience.slurm.companion_job import FoundCompanion, companion_of
from slurm_resilience.slurm.hostlists import expand

_EMPTY = {"(null)", "n/a", "N/A", "None", "none"}

# Every field begins so. Slurm's releases add new ones, so none of them is named here.
_FIELD = re.compile(r"(?:^| )([A-Z]\w*)=")
# Administrators' text, blanks and `Key=` included. Fields that tell facts stand before the first of
# them, and are read there only.
_FREE_TEXT = re.compile(r" (Reason|Comment|Extra)=")
# A field that stands before them, or would, but for this node: in their text it is none.
BEFORE_FREE_TEXT = frozenset(
    {
        "ActiveFeatures", "AllocMem", "AllocTRES", "Arch", "AvailableFeatures", "AveWatts",
        "Boards", "BootTime", "CPUAlloc", "CPUEfctv", "CPULoad", "CPUTot", "CapWatts", "CfgTRES",
        "CoreSpecCount", "CoresPerSocket", "CpuSpecList", "CurrentWatts", "ExtSensorsJoules",
        "ExtSensorsTemp", "ExtSensorsWatts", "FreeMem", "Gres", "GresDrain", "GresUsed",
        "LastBusyTime", "MCS_label", "MemSpecLimit", "NodeAddr", "NodeHostName", "NodeName", "OS",
        "Owner", "Partitions", "Port", "RealMemory", "Reason", "ResumeAfterTime",
        "SlurmdStartTime", "Sockets", "State", "SuspendTime", "ThreadsPerCore", "TmpDisk",
        "Version", "Weight",
    }
)  # fmt: skip
# The first line of a reason ends with `[user@time]`, and a user's name may be a mail address.
_AUTHOR = re.compile(r" \[(?P<by>[^\[\]]*)@(?P<at>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\]")
_NEXT_LINE = " " * 8
"""Stands before the second and each later line of a reason."""
_RECORD = "\nNodeName="

# The state's suffix characters and FAILING, DRAINED etc. are how people are shown base + flags.
_COMPOSITE = {
    "FAILING": ("ALLOCATED", {"FAIL"}),
    "DRAINING": ("ALLOCATED", {"DRAIN"}),
    "DRAINED": ("IDLE", {"DRAIN"}),
}
_BASES = frozenset({"IDLE", "ALLOCATED", "MIXED", "DOWN", "UNKNOWN", "FUTURE", "ERROR", "ALLOC"})


def _clean(value: str) -> str:
    value = value.strip()
    return "" if value in _EMPTY else value


def nodes(text: str) -> tuple[Node, ...]:
    """All nodes of `scontrol show node -a -d -o`. A comment may hold line ends.

    Raises:
        SlurmError: a line without a node's name or state.
    """
    return tuple(node(record) for record in node_records(text))


def node_records(text: str) -> list[str]:
    """Return the parts of `scontrol show node -a -d -o` that `node` reads, one of each node.

    Raises:
        SlurmError: the text begins with something else.
    """
    head, *records = f"\n{text}".split(_RECORD)
    if "=" in head:
        raise SlurmError(
            f"scontrol show node printed a line without 'NodeName': {head.lstrip()[:80]}"
        )
    return [f"NodeName={record}" for record in records]


def node(record: str) -> Node:
    """Return the node of a record.

    Raises:
        SlurmError: it has no name or no state.
    """
    record = record.rstrip()
    free = _FREE_TEXT.search(record)
    start = free.start() if free else len(record)
    # Of each field the first one counts.
    fields = dict(reversed(list(_fields(record[:start], frozenset()))))
    try:
        name, state = fields["NodeName"].strip(), fields["State"].strip()
    except KeyError as key:
        raise SlurmError(
            f"scontrol show node printed a line without {key}: {record[:80]}"
        ) from None
    base, flags = node_state(state)
    known = BEFORE_FREE_TEXT | fields.keys()
    reason = _Reason()
    if free and free[1] == "Reason":
        reason = _reason(record[free.end() :], known)
        start = len(record) - len(reason.rest)
        if not reason.text.strip():
            reason = _Reason()
    more = dict(reversed(list(_fields(record[start:], known))))
    return Node(
        name=name,
        base=base,
        flags=flags,
        # Blanks are kept: a trailing one makes `Action:Replace ` a near miss, not a command.
        reason=reason.text,
        reason_by=reason.by,
        reason_at=reason.at,
        reason_unclear=reason.unclear,
        address=_clean(fields.get("NodeAddr", "")),
        hostname=_clean(fields.get("NodeHostName", "")),
        port=int(_clean(fields.get("Port", "")) or 6818),
        gres=_clean(fields.get("Gres", "")),
        gres_used=_clean(fields.get("GresUsed", "")),
        cpus=int(_clean(fields.get("CPUTot", "")) or 0),
        cpus_alloc=int(_clean(fields.get("CPUAlloc", "")) or 0),
        memory=int(_clean(fields.get("RealMemory", "")) or 0),
        boot_time=_clean(fields.get("BootTime", "")),
        comment=_clean(more.get("Comment", "")),
        partitions=tuple(p for p in _clean(fields.get("Partitions", "")).split(",") if p),
        features=tuple(f for f in _clean(fields.get("AvailableFeatures", "")).split(",") if f),
    )


def _fields(text: str, known: AbstractSet[str]) -> Iterator[tuple[str, str]]:
    """Each field with its value, which ends where the next field begins.

    Args:
        text: a part of a record.
        known: what looks like these fields is text.
    """
    marks = [mark for mark in _FIELD.finditer(text) if mark[1] not in known]
    ends = [*(mark.start() for mark in marks), len(text)][1:]
    for mark, end in zip(marks, ends, strict=True):
        yield mark[1], text[mark.end() : end]


class _Reason(NamedTuple):
    text: str = ""
    by: str = ""
    at: str = ""
    unclear: bool = False
    rest: str = ""
    """The text that follows it in the record."""


def _reason(text: str, known: AbstractSet[str]) -> _Reason:
    """Read a reason, and tell where it ends, without knowing every field that may follow it.

    Args:
        text: a record from behind ``Reason=`` on.
        known: fields that stand before the reason, and so not behind it.
    """
    ends = [
        author
        for author in _AUTHOR.finditer(text)
        if author.end() == len(text)
        or text.startswith(_NEXT_LINE, author.end())
        or _begins_a_field(text, author.end(), known)
    ]
    if not ends:
        return _Reason(text.strip(), unclear=bool(text.strip()))
    first = ends[0]
    rest = text[first.end() :]
    lines = ""
    if rest.startswith(_NEXT_LINE):
        following = (m.start() for m in _FIELD.finditer(rest) if m[1] not in known)
        # One that a line of the reason begins with is that line's text.
        fields = (at for at in following if not rest[: at + 1].endswith(_NEXT_LINE))
        end = next(fields, len(rest))
        lines, rest = rest[:end], rest[end:]
    more = lines.split(_NEXT_LINE)[1:]
    # Two ends: one of them is a word of the reason's, or of a comment's.
    unclear = len(ends) > 1
    return _Reason(
        "\n".join([text[: first.start()], *more]), first["by"], first["at"], unclear, rest
    )


def _begins_a_field(text: str, at: int, known: AbstractSet[str]) -> bool:
    field = _FIELD.match(text, at)
    return field is not None and field[1] not in known


def node_state(text: str) -> tuple[str, frozenset[str]]:
    """Split e.g. ``ALLOCATED+FAIL``, ``DOWN*+DRAIN``, ``IDLE*`` into base state and flags."""
    flags: set[str] = set()
    base = ""
    for part in text.upper().split("+"):
        word = part.rstrip("*~#!%$@^-")
        if "*" in part[len(word) :]:
            flags.add("NOT_RESPONDING")
        if not base:
            if word in _COMPOSITE:
                base, extra = _COMPOSITE[word]
                flags |= extra
            elif word in _BASES:
                base = "ALLOCATED" if word == "ALLOC" else word
            else:
                # e.g. COMPLETING, PLANNED, RESERVED, MAINT first: the base is a shown word.
                base = {"COMPLETING": "ALLOCATED", "FAIL": "IDLE"}.get(word, "IDLE")
                flags.add(word)
        elif word:
            flags.add(word)
    return base, frozenset(flags)


REQUEST_FORMAT = "%A %D %T %l %r"
"""squeue -o for `node_requests`: id, nodes, state, time limit, Slurm's reason for its wait. No text
that a user writes."""
_HELD = frozenset({"JobHeldAdmin", "JobHeldUser"})
"""Reasons by which a person keeps a job from starting: a priority would release it."""
_LIMIT = re.compile(r"(?:(?P<days>\d+)-)?(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)")


class PendingRequests(NamedTuple):
    """Requests for nodes in place of those that a job lost, each with its number of nodes."""

    raised: dict[int, int]
    """Those to be put before the queue."""
    holding: dict[int, int]
    """Those that have nodes already."""


def node_requests(text: str, limit: str, nodes: int) -> PendingRequests:
    """Tell which pending requests are to be put before the queue for a job that lost nodes.

    A user can give any job the name of such a request, and Slurm does not show what it is for. But
    Slurm gives a real one no longer time limit than the job's, so that is all that a false one can
    get, and nodes that earlier ones hold count as given.

    Args:
        text: what squeue printed in `REQUEST_FORMAT` for jobs of that name and user.
        limit: the time limit of the job that lost nodes, as squeue prints it.
        nodes: how many.
    """
    pending: list[tuple[int, int]] = []
    holding: dict[int, int] = {}
    for line in text.splitlines():
        number, size, state, its_limit, *why = line.split()
        if state != "PENDING":
            holding[int(number)] = int(size)
        elif limit_seconds(its_limit) <= limit_seconds(limit) and _HELD.isdisjoint(why):
            pending.append((int(number), int(size)))
    left = nodes - sum(holding.values())
    raised = {}
    for request, wanted in sorted(pending):
        if wanted <= left:
            left -= wanted
            raised[request] = wanted
    return PendingRequests(raised, holding)


COMPANION_FORMAT = "%A %t %j|%r"
"""squeue -o for `companions`: id, state, the name, in which a user may write anything, and why it
waits."""
_OVER = frozenset({"CD", "CA", "F", "TO", "NF", "PR", "BF", "DL", "OOM"})
"""squeue's short words for jobs that have ended."""


def companions(text: str, job_id: int) -> tuple[FoundCompanion, ...]:
    """Read which jobs are companions of one.

    A line that has another form belongs to a name with a line end in it, and is passed over.

    Args:
        text: what squeue printed in `COMPANION_FORMAT`.
        job_id: the main job.
    """
    found = []
    for line in text.splitlines():
        known, _, waits_for = line.rpartition("|")
        words = known.split()
        if len(words) == 3 and words[0].isdecimal() and words[1] not in _OVER:
            companion = companion_of(int(words[0]), words[2], waits_for)
            if companion is not None and companion.job == job_id:
                found.append(companion)
    return tuple(found)


def limit_seconds(text: str) -> float:
    """Return a time limit in seconds; without end where it is not given as a time."""
    found = _LIMIT.fullmatch(text.strip())
    if found is None:
        return math.inf
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def has_exclusive_column(help_format: str) -> bool:
    """Tell from `squeue --helpFormat` whether `JOB_COLUMNS_EXCLUSIVE` may be asked for."""
    return "Exclusive" in help_format.split()


Expand = Callable[[str], tuple[str, ...]]
"""Returns the names of a hostlist, as `hostlists.expand` does."""


def jobs(text: str, mark: str, columns: str, expanded: Expand = expand) -> tuple[Job, ...]:
    """Jobs from the outputs of ``squeue -o job_format(mark)`` and ``squeue -O JOB_COLUMNS``, or
    ``JOB_COLUMNS_EXCLUSIVE``.

    A job that only one of them lists has come or gone in between, and is left out.

    Args:
        text: of the first.
        mark: as in the format.
        columns: of the second.
        expanded: expands a node list.

    Raises:
        SlurmError: a record that does not have the asked form.
    """
    extra: dict[int, _Columns] = {}
    for line in columns.splitlines():
        words = line.split()
        if not 4 <= len(words) <= 5 or not all(word.isdecimal() for word in words[:4]):
            raise SlurmError(f"squeue -O printed an unexpected line: {line[:80]!r}")
        exclusive = words[4] == "NODE" if len(words) == 5 else None
        extra[int(words[0])] = _Columns(words[1] == "1", int(words[2]), words[3] == "1", exclusive)
    head, *words = text.split(mark)
    size = len(JOB_FIELDS)
    if head.strip() or len(words) % size:
        raise SlurmError(f"squeue -o printed something unexpected: {text[:80]!r}")
    found = (_job(words[i : i + size], extra, expanded) for i in range(0, len(words), size))
    return tuple({job.id: job for job in found if job is not None}.values())


def preempt_time(text: str, job_id: int) -> str:
    """Return when Slurm began to preempt a job, from ``squeue -O PREEMPT_COLUMNS``; empty: it did
    not."""
    for line in text.splitlines():
        number, _, time = line.strip().partition(" ")
        if number == str(job_id):
            return time.strip() if time.strip()[:1].isdigit() else ""
    return ""


class _Columns(NamedTuple):
    requeue: bool
    restarts: int
    is_batch: bool
    exclusive: bool | None
    """None: this squeue does not print it, and `%h` tells."""


_RUNS = ("SIGNALING", "RESIZING")
"""Words for what is being done with a running job, which squeue shows in place of RUNNING."""


def _job(words: list[str], extra: dict[int, _Columns], expanded: Expand) -> Job | None:
    if not words[0].isdecimal() or not words[1].isdecimal():
        raise SlurmError(f"squeue -o printed an unexpected record: {words[:4]!r}")
    job_id = int(words[0])
    if job_id not in extra:
        return None
    columns = extra[job_id]
    exclusive = columns.exclusive
    nodelist = _clean(words[12])
    companion = companion_of(job_id, words[13])
    return Job(
        id=job_id,
        uid=int(words[1]),
        state="RUNNING" if words[2] in _RUNS else words[2],
        batch_host=_clean(words[3]),
        num_nodes=int(words[4]) if words[4].isdecimal() else 0,
        exclusive=words[5] in ("NO", "EXCLUSIVE") if exclusive is None else exclusive,
        gres=_clean(words[6]),
        partition=_clean(words[7]),
        account=_clean(words[8]),
        qos=_clean(words[9]),
        reservation=_clean(words[10]),
        time_left=_clean(words[11]),
        nodes=expanded(nodelist) if nodelist else (),
        requeue=columns.requeue,
        restarts=columns.restarts,
        is_batch=columns.is_batch,
        companion_of=(companion.job, companion.restarts) if companion is not None else None,
        companion_supervisor=companion.supervisor if companion is not None else 0,
        is_lent=companion is not None and companion.lent,
    )


class Placement(NamedTuple):
    """The nodes that a job may get, by its own words."""

    excluded: tuple[str, ...] = ()
    """sbatch --exclude."""
    features: str = ""
    """sbatch --constraint."""


def placement_format(mark: str) -> str:
    """squeue -o for `placement`.

    Args:
        mark: a word that no user can foresee; it stands before each field.
    """
    return "".join(f"{mark}%{letter}" for letter in "Axf")


def placement(text: str, mark: str, job_id: int) -> Placement:
    """Read what a job says of its nodes.

    Raises:
        SlurmError: the text does not have the asked form.
    """
    head, *words = text.split(mark)
    if head.strip() or len(words) % 3:
        raise SlurmError(f"squeue -o printed something unexpected: {text[:80]!r}")
    for at in range(0, len(words), 3):
        if words[at].strip() == str(job_id):
            excluded = _clean(words[at + 1])
            return Placement(expand(excluded) if excluded else (), _clean(words[at + 2]))
    return Placement()


def own_name(text: str, job_id: int) -> str:
    """Read the name of a job from ``squeue -r -o '%A %F %K'``: ``12``, or ``12_3`` in an array.

    Empty: the text has no such job.

    Raises:
        SlurmError: the text does not have the asked form.
    """
    for line in text.splitlines():
        words = line.split()
        if len(words) != 3 or not (words[0].isdecimal() and words[1].isdecimal()):
            raise SlurmError(f"squeue -o printed an unexpected line: {line[:80]!r}")
        if int(words[0]) == job_id:
            return f"{words[1]}_{words[2]}" if words[2].isdecimal() else words[0]
    return ""


# They are compiled when they are needed: no supervised step waits for it.
_STEP = r"StepId=(?P<job>\d+(?:_\d+)?)(?:\+\d+)?\.(?P<step>\S+) "
_STEP_NODES = r" NodeList=(?P<nodes>\S+) Nodes=(?:\d+ CPUs=\d+ Tasks=(?P<tasks>\d+) )?"
_STEP_SRUN = r" SrunHost:Pid=(?P<host>[^ :]+):(?P<pid>\d+)"


def steps(text: str, job_id: int, name: str = "") -> tuple[StepInfo, ...]:
    """Read the steps of `scontrol show step JOB -o`. Text that is no step of the job is passed
    over.

    The step's name is the user's text, line ends included; it stands between the nodes and srun's
    pid, so the first match of one and the last of the other are Slurm's.

    Args:
        text: as it was printed.
        job_id: of the job.
        name: the text calls the job so (``12_3`` in an array); empty: by its number.
    """
    name = name or str(job_id)
    records = re.split(rf"(?m)^(?=StepId={name}[.+])", text)

    def each() -> Iterator[StepInfo]:
        for record in records:
            head = re.match(_STEP, record)
            if not head or head["job"] != name:
                continue
            where = re.search(_STEP_NODES, record)
            srun = list(re.finditer(_STEP_SRUN, record))
            nodelist = _clean(where["nodes"]) if where else ""
            yield StepInfo(
                job=job_id,
                step=head["step"],
                nodes=expand(nodelist) if nodelist else (),
                srun_host=_clean(srun[-1]["host"]) if srun else "",
                srun_pid=int(srun[-1]["pid"]) if srun else 0,
                tasks=int((where["tasks"] if where else None) or 0),
            )

    return tuple(each())


def config(text: str) -> ClusterInfo:
    """`scontrol show config`.

    Raises:
        SlurmError: the text has no cluster name: it is something else.
    """
    raw: dict[str, str] = {}
    for line in text.splitlines():
        key, sep, value = line.partition("=")
        if sep and key.strip() and key.strip() not in raw:
            raw[key.strip()] = _clean(value)
    if "ClusterName" not in raw:
        raise SlurmError("scontrol show config printed no ClusterName")
    hosts = []
    for key, value in raw.items():
        if key.startswith("SlurmctldHost[") or key == "SlurmctldHost":
            address = re.search(r"\(([^)]+)\)", value)
            hosts.append(address[1] if address else value)
    socket = re.search(r"(?:^|[,;])socket=([^,;]+)", raw.get("AuthInfo", ""))
    uid = re.search(r"\((\d+)\)", raw.get("SlurmUser", "root(0)"))
    port = re.match(r"\d+", raw.get("SlurmctldPort", "6817") or "6817")
    return ClusterInfo(
        cluster=raw["ClusterName"],
        version=raw.get("SLURM_VERSION", ""),
        controllers=tuple(hosts),
        slurmctld_port=int(port[0]) if port else 6817,
        slurm_user_uid=int(uid[1]) if uid else 0,
        munge_socket=socket[1] if socket else "",
        scheduler_parameters=raw.get("SchedulerParameters", ""),
        accounting=raw.get("AccountingStorageType", ""),
        raw=raw,
    )
