"""Text of Slurm's commands → the model. Pure.

Nodes come from `scontrol show node -o` (stable over 22.05, 24.11 and 26.05; only administrators
can write free text there). Jobs come from squeue with a format of our own whose separator is drawn
anew for each call: users choose a job's account and quality of service where Slurm does not check
them, with ``|`` and line ends, and nothing that a user writes may become a fact, or blind us.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from slurm_resilience.errors import SlurmError
from slurm_resilience.model import Job, Node
from slurm_resilience.slurm.client import ClusterInfo, StepInfo
from slurm_resilience.slurm.hostlists import expand

_EMPTY = {"(null)", "n/a", "N/A", "None", "none"}

# Free text fields end a line: everything after their key is theirs until the next of these keys.
_NODE_FIELD = re.compile(
    r"(?:^| )(NodeName|Gres|GresUsed|NodeAddr|NodeHostName|Port|State|RealMemory|CPUTot|CPUAlloc|"
    r"Partitions|BootTime|Comment|Extra|OS|Version|CfgTRES|AllocTRES|Owner|ActiveFeatures|"
    r"AvailableFeatures|CapWatts|CurrentWatts|ExtSensorsJoules|SlurmdStartTime|LastBusyTime|"
    r"ResumeAfterTime|MCS_label|GresDrain|InstanceId|InstanceType|CertFlags|TLSCertLastRenewal|"
    r"CPULoad|CPUEfctv|AllocMem|FreeMem|Weight|TmpDisk|Arch|CoresPerSocket|Sockets|Boards|"
    r"ThreadsPerCore|AveWatts|ExtSensorsWatts|ExtSensorsTemp|Topology)="
)
# A reason ends with `[user@time]`; its second and later lines follow, indented, behind that.
_REASON = re.compile(
    r"(?s) Reason=(?P<text>.*?) \[(?P<by>[^\[\]@]*)@(?P<at>[^\[\]@]*)\](?P<more> {8}.*?)??"
    r"(?= (?:Comment|Extra|InstanceId|InstanceType|CertFlags|TLSCertLastRenewal|Topology)=|\s*\Z)"
)
_RECORD = re.compile(r"(?m)^(?=NodeName=)")

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
    head, *records = _RECORD.split(text)
    if "=" in head:
        raise SlurmError(f"scontrol show node printed a line without 'NodeName': {head[:80]}")
    return tuple(_node(record) for record in records)


def _node(record: str) -> Node:
    # Reason and Comment are administrators' free text at the end. The reason is cut out first, and
    # of each key the first one counts: a word of theirs that looks like a field is none.
    reason, by, at, rest = _reason(record)
    first: dict[str, re.Match[str]] = {}
    for mark in _NODE_FIELD.finditer(rest):
        first.setdefault(mark.group(1), mark)
    ends = [*(mark.start() for mark in first.values()), len(rest)][1:]
    fields = {
        key: rest[mark.end() : end] for (key, mark), end in zip(first.items(), ends, strict=True)
    }
    try:
        name, state = fields["NodeName"].strip(), fields["State"].strip()
    except KeyError as key:
        raise SlurmError(
            f"scontrol show node printed a line without {key}: {record[:80]}"
        ) from None
    base, flags = node_state(state)
    return Node(
        name=name,
        base=base,
        flags=flags,
        # Blanks are kept: a trailing one makes `Action:Replace ` a near miss, not a command.
        reason=reason,
        reason_by=by,
        reason_at=at,
        address=_clean(fields.get("NodeAddr", "")),
        port=int(_clean(fields.get("Port", "")) or 6818),
        gres=_clean(fields.get("Gres", "")),
        gres_used=_clean(fields.get("GresUsed", "")),
        cpus=int(_clean(fields.get("CPUTot", "")) or 0),
        cpus_alloc=int(_clean(fields.get("CPUAlloc", "")) or 0),
        memory=int(_clean(fields.get("RealMemory", "")) or 0),
        boot_time=_clean(fields.get("BootTime", "")),
        comment=_clean(fields.get("Comment", "")),
        partitions=tuple(p for p in _clean(fields.get("Partitions", "")).split(",") if p),
    )


def _reason(record: str) -> tuple[str, str, str, str]:
    """A node's reason, its user and time, and the record without it."""
    start = record.find(" Reason=")
    comment = record.find(" Comment=")
    if start < 0 or 0 <= comment < start:
        return "", "", "", record
    found = _REASON.match(record, start)
    if not found:
        return "", "", "", record
    lines = [found["text"], *filter(None, re.split(r" {8}", found["more"] or ""))]
    return "\n".join(lines), found["by"], found["at"], record[:start] + record[found.end() :]


def node_state(text: str) -> tuple[str, frozenset[str]]:
    """Base state and flags of e.g. ``ALLOCATED+FAIL``, ``DOWN*+DRAIN``, ``IDLE*``."""
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


_JOB_FIELDS = "AUTBDhbPaqvLN"
"""squeue's letters: id, uid, state, batch host, nodes, sharing, GRES per node, partition, account,
quality of service, reservation, time left, node list (untruncated)."""
JOB_COLUMNS = "JobID:16,Requeue:8,RestartCnt:12,BatchFlag:8"
"""squeue -O: what -o cannot print; fixed width, numbers only."""
JOB_COLUMNS_EXCLUSIVE = f"{JOB_COLUMNS},Exclusive:8"
"""The same where squeue has this field: its `%h` says NO for every job there (seen on 26.05)."""


def job_format(mark: str) -> str:
    """squeue -o for `jobs`.

    Args:
        mark: a word that no user can foresee; it stands before each field.
    """
    return "".join(f"{mark}%{letter}" for letter in _JOB_FIELDS)


def jobs(text: str, mark: str, columns: str) -> tuple[Job, ...]:
    """Jobs from the outputs of ``squeue -o job_format(mark)`` and ``squeue -O JOB_COLUMNS``.

    A job that only one of them lists has come or gone in between, and is left out.

    Raises:
        SlurmError: a record that does not have the asked form.
    """
    extra: dict[int, tuple[bool, int, bool]] = {}
    for line in columns.splitlines():
        words = line.split()
        if len(words) != 4 or not all(word.isdecimal() for word in words):
            raise SlurmError(f"squeue -O printed an unexpected line: {line[:80]!r}")
        extra[int(words[0])] = (words[1] == "1", int(words[2]), words[3] == "1")
    head, *words = text.split(mark)
    size = len(_JOB_FIELDS)
    if head.strip() or len(words) % size:
        raise SlurmError(f"squeue -o printed something unexpected: {text[:80]!r}")
    found = (_job(words[i : i + size], extra) for i in range(0, len(words), size))
    return tuple({job.id: job for job in found if job is not None}.values())


def _job(words: list[str], extra: dict[int, tuple[bool, int, bool]]) -> Job | None:
    if not words[0].isdecimal() or not words[1].isdecimal():
        raise SlurmError(f"squeue -o printed an unexpected record: {words[:4]!r}")
    job_id = int(words[0])
    if job_id not in extra:
        return None
    requeue, restarts, is_batch = extra[job_id]
    nodelist = _clean(words[12])
    return Job(
        id=job_id,
        uid=int(words[1]),
        state=words[2],
        batch_host=_clean(words[3]),
        num_nodes=int(words[4]) if words[4].isdecimal() else 0,
        exclusive=words[5] in ("NO", "EXCLUSIVE"),
        gres=_clean(words[6]),
        partition=_clean(words[7]),
        account=_clean(words[8]),
        qos=_clean(words[9]),
        reservation=_clean(words[10]),
        time_left=_clean(words[11]),
        nodes=expand(nodelist) if nodelist else (),
        requeue=requeue,
        restarts=restarts,
        is_batch=is_batch,
    )


_STEP = re.compile(r"StepId=(?P<job>\d+)(?:\+\d+)?\.(?P<step>\S+) ")
_STEP_NODES = re.compile(r" NodeList=(?P<nodes>\S+) Nodes=(?:\d+ CPUs=\d+ Tasks=(?P<tasks>\d+) )?")
_STEP_SRUN = re.compile(r" SrunHost:Pid=(?P<host>[^ :]+):(?P<pid>\d+)")


def steps(text: str, job_id: int) -> tuple[StepInfo, ...]:
    """Steps of `scontrol show step JOB -o`. Text that is no step of the job is passed over.

    The step's name is the user's text, line ends included; it stands between the nodes and srun's
    pid, so the first match of one and the last of the other are Slurm's.
    """
    records = re.split(rf"(?m)^(?=StepId={job_id}[.+])", text)

    def each() -> Iterator[StepInfo]:
        for record in records:
            head = _STEP.match(record)
            if not head or int(head["job"]) != job_id:
                continue
            where = _STEP_NODES.search(record)
            srun = list(_STEP_SRUN.finditer(record))
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
