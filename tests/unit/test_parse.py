"""Parse: text that Slurm 22.05.8 printed, and text that users would like to have been printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.errors import SlurmError
from slurm_resilience.model import REPLACE, Job
from slurm_resilience.slurm import command_words, parse
from slurm_resilience.slurm.companion_job import with_companions

HEAD = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=1  CPUAlloc=4 CPUEfctv=4 CPUTot=4 CPULoad=1.20 "
    "AvailableFeatures=(null) ActiveFeatures=(null) Gres={gres} GresDrain=N/A "
    "{used}NodeAddr=127.0.0.1 NodeHostName=n1 Port=40949 Version=22.05.8 "
    "OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0  RealMemory=1000 AllocMem=0 FreeMem=22289 "
    "Sockets=4 Boards=1 State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A "
    "Partitions=main,long  BootTime=2026-11-20T11:41:43 SlurmdStartTime=2026-11-20T11:41:45 "
    "LastBusyTime=2026-11-20T11:41:45 CfgTRES=cpu=4,mem=1000M,billing=4 AllocTRES= CapWatts=n/a "
    "CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s"
)
SET = "[root@2026-11-20T11:47:50]"


def line(state: str = "IDLE", tail: str = "", gres: str = "(null)", used: str = "") -> str:
    return HEAD.format(state=state, gres=gres, used=used) + tail + "\n"


def one(text: str):  # type: ignore[no-untyped-def]
    (node,) = parse.nodes(text)
    return node


# -- nodes ------------------------------------------------------------------------------------


def test_a_node() -> None:
    node = one(line(gres="gpu:h100:2", used="GresUsed=gpu:h100:1(IDX:0) "))
    assert (node.name, node.address, node.port) == ("n1", "127.0.0.1", 40949)
    assert (node.gres, node.gres_used) == ("gpu:h100:2", "gpu:h100:1(IDX:0)")
    assert (node.cpus, node.cpus_alloc, node.memory) == (4, 4, 1000)
    assert node.partitions == ("main", "long")
    assert node.boot_time == "2026-11-20T11:41:43"
    assert (node.reason, node.reason_by, node.reason_at, node.comment) == ("", "", "", "")


@pytest.mark.parametrize(
    ("shown", "state", "available", "work"),
    [
        ("IDLE", "IDLE", True, False),
        ("ALLOCATED", "ALLOCATED", True, True),
        ("MIXED+DRAIN", "MIXED+DRAIN", False, True),
        ("IDLE+FAIL", "IDLE+FAIL", False, False),
        ("ALLOCATED+FAIL", "ALLOCATED+FAIL", False, True),
        ("IDLE+COMPLETING", "IDLE+COMPLETING", True, True),
        ("IDLE+PLANNED", "IDLE+PLANNED", True, False),
        ("IDLE+RESERVED", "IDLE+RESERVED", True, False),
        ("IDLE+MAINTENANCE+RESERVED", "IDLE+MAINTENANCE+RESERVED", False, False),
        ("IDLE+FAIL+MAINTENANCE+RESERVED", "IDLE+FAIL+MAINTENANCE+RESERVED", False, False),
        ("DOWN+NOT_RESPONDING", "DOWN+NOT_RESPONDING", False, False),
        ("DOWN+FAIL+NOT_RESPONDING", "DOWN+FAIL+NOT_RESPONDING", False, False),
        ("ALLOCATED+REBOOT_REQUESTED", "ALLOCATED+REBOOT_REQUESTED", True, True),
        ("DOWN*+DRAIN", "DOWN+DRAIN+NOT_RESPONDING", False, False),
        ("IDLE*", "IDLE+NOT_RESPONDING", False, False),
        ("IDLE+CLOUD+POWERED_DOWN", "IDLE+CLOUD+POWERED_DOWN", False, False),
        ("IDLE+POWERING_DOWN", "IDLE+POWERING_DOWN", False, False),
        ("FUTURE", "FUTURE", False, False),
        ("UNKNOWN+NOT_RESPONDING", "UNKNOWN+NOT_RESPONDING", False, False),
    ],
)
def test_states(shown: str, state: str, available: bool, work: bool) -> None:
    node = one(line(shown))
    assert node.state == state
    assert (node.is_available, node.has_work) == (available, work)


@pytest.mark.parametrize(
    ("tail", "reason", "comment"),
    [
        (f" Reason=Action:Replace {SET}", REPLACE, ""),
        (f" Reason=Action:Replace  {SET}", "Action:Replace ", ""),
        (f" Reason=x [root@now] y {SET}", "x [root@now] y", ""),
        (f" Reason=Action:Replace OS=x {SET}", "Action:Replace OS=x", ""),
        (f" Reason=Action:Replace Comment=x {SET}", "Action:Replace Comment=x", ""),
        (f" Reason=State=DOWN Gres=gpu:8 {SET}", "State=DOWN Gres=gpu:8", ""),
        (f" Reason=one {SET}        two a=b        three", "one\ntwo a=b\nthree", ""),
        (f" Reason=one {SET} Comment=two", "one", "two"),
        (f" Reason=one {SET}        two Comment=c", "one\ntwo", "c"),
        (" Comment=one\ntwo a=b Reason=Action:Replace [root@x]", "", None),
        (" Comment=State=DOWN Port=1", "", None),
    ],
)
def test_reasons_and_comments(tail: str, reason: str, comment: str | None) -> None:
    node = one(line("IDLE+FAIL", tail))
    assert node.reason == reason
    if reason:
        assert (node.reason_by, node.reason_at) == ("root", "2026-11-20T11:47:50")
    if comment is not None:
        assert node.comment == comment
    assert (node.state, node.gres, node.port) == ("IDLE+FAIL", "", 40949)


def test_a_comment_of_several_lines_belongs_to_its_node() -> None:
    text = line(tail=" Comment=one\ntwo") + "\n" + line().replace("n1", "n2")
    first, second = parse.nodes(text)
    assert (first.comment, second.name, second.comment) == ("one\ntwo", "n2", "")


@pytest.mark.parametrize("text", ["State=IDLE\n", "NodeName=n1 Arch=x86_64\n", "NodeName=n1"])
def test_what_is_no_node_is_refused(text: str) -> None:
    with pytest.raises(SlurmError):
        parse.nodes(text)


def test_no_nodes() -> None:
    assert parse.nodes("No nodes in the system\n") == ()


# -- jobs -------------------------------------------------------------------------------------

MARK = "<8d0c1f6e5a4b3c2d>"
RUNNING = ("7", "1000", "RUNNING", "n3", "2", "NO", "gres:gpu:2", "main", "acct", "q", "r", "1:00")
COLUMNS = "7               1       2           1       \n"


def shown(*fields: str, nodes: str = "n[3-4]", name: str = "train") -> str:
    return "".join(f"{MARK}{field}" for field in (*fields, nodes, name)) + "\n"


def test_a_job() -> None:
    (job,) = parse.jobs(shown(*RUNNING), MARK, COLUMNS)
    assert (job.id, job.uid, job.state, job.nodes) == (7, 1000, "RUNNING", ("n3", "n4"))
    assert (job.batch_host, job.num_nodes, job.gres) == ("n3", 2, "gres:gpu:2")
    assert (job.requeue, job.restarts, job.is_batch, job.exclusive) == (True, 2, True, True)
    assert (job.partition, job.account, job.qos, job.reservation) == ("main", "acct", "q", "r")


def test_a_job_that_is_being_signalled_runs() -> None:
    """Slurm shows that for a moment in place of RUNNING: as a job is preempted, say."""
    for state in ("SIGNALING", "RESIZING"):
        (job,) = parse.jobs(shown(*RUNNING[:2], state, *RUNNING[3:]), MARK, COLUMNS)
        assert (job.state, job.nodes) == ("RUNNING", ("n3", "n4"))


def test_nothing_is_empty() -> None:
    pending = ("7", "0", "PENDING", "n/a", "2", "OK", "N/A", "main", "(null)", "(null)", "(null)")
    (job,) = parse.jobs(shown(*pending, "UNLIMITED", nodes=""), MARK, COLUMNS)
    assert (job.batch_host, job.gres, job.account, job.reservation) == ("", "", "", "")
    assert (job.nodes, job.exclusive) == ((), False)


def test_a_job_that_came_in_between_is_left_out() -> None:
    assert parse.jobs(shown(*RUNNING), MARK, "") == ()
    assert parse.jobs("", MARK, COLUMNS) == ()


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("slurm_load_jobs error: whatever\n", COLUMNS),
        (shown("7", "1000"), COLUMNS),
        (shown("x", *RUNNING[1:]), COLUMNS),
        (shown(*RUNNING), "7 1 2\n"),
        (shown(*RUNNING), "7 1 x 1\n"),
    ],
)
def test_what_is_no_job_is_refused(text: str, columns: str) -> None:
    with pytest.raises(SlurmError):
        parse.jobs(text, MARK, columns)


FREE = st.text(
    st.one_of(st.characters(), st.sampled_from("|\n\r= <>[]%:")), max_size=40
) | st.sampled_from(("x|y", "x\n9|0|RUNNING", "<<>>", "(null)", " UserId=root(0)"))


def test_a_companion_is_known_by_its_name() -> None:
    name = "sres-companion-of-5.2-4711"
    (job,) = parse.jobs(shown(*RUNNING, name=name), MARK, COLUMNS)
    assert job.companion_of == (5, 2) and not job.is_lent
    (lent,) = parse.jobs(shown(*RUNNING, name=f"{name}-lent"), MARK, COLUMNS)
    assert lent.companion_of == (5, 2) and lent.is_lent
    main = Job(5, 1000, "RUNNING", nodes=("n1",), restarts=2)
    both = with_companions({5: main, 7: job})
    assert both[5].all_nodes == ("n1", "n3", "n4") and both[7].companion_of == (5, 2)
    # Another user's job, or another run of it.
    for other in (Job(5, 1001, "RUNNING", restarts=2), Job(5, 1000, "RUNNING", restarts=3)):
        both = with_companions({7: job, 5: other})
        assert both[5].companion_nodes == () and both[7].companion_of is None
    assert with_companions({7: job})[7].companion_of is None


@given(account=FREE, qos=FREE, other=FREE, name=FREE)
def test_nothing_that_a_user_can_name_changes_what_is_read(
    account: str, qos: str, other: str, name: str
) -> None:
    mine = (*RUNNING[:8], account, qos, *RUNNING[10:])
    theirs = ("8", "1001", "RUNNING", "n5", "1", "NO", "N/A", "main", other, other, "(null)", "1:0")
    text = shown(*mine, name=name) + shown(*theirs, nodes="n5")
    first, second = parse.jobs(text, MARK, COLUMNS + "8 0 0 1\n")
    assert (first.id, first.uid, first.nodes) == (7, 1000, ("n3", "n4"))
    assert (second.id, second.uid, second.nodes, second.requeue) == (8, 1001, ("n5",), False)
    assert first.reservation == "r" and second.reservation == ""


def test_the_format_asks_for_every_field_behind_the_mark() -> None:
    text = command_words.job_format(MARK)
    assert text.startswith(MARK + "%A") and text.endswith("%j")
    assert text.count(MARK) == text.count("%")


# -- steps ------------------------------------------------------------------------------------

STEP = (
    "StepId=1.{step} UserId=0 StartTime=2026-11-20T11:43:49 TimeLimit=UNLIMITED State=RUNNING "
    "Partition=main NodeList=n[3-4] Nodes=2 CPUs=8 Tasks=2 Name={name} Network=(null) "
    "TRES=cpu=8,mem=0,node=2 ResvPorts=(null) CPUFreqReq=Default Dist=Cyclic SrunHost:Pid={srun}\n"
)


def test_steps() -> None:
    text = STEP.format(step="batch", name="batch", srun="(null):0")
    text += STEP.format(step="0", name="sleep", srun="n3:12")
    batch, step = parse.steps(text, 1)
    assert (batch.step, batch.srun_host, batch.srun_pid) == ("batch", "", 0)
    assert (step.job, step.step, step.nodes, step.tasks) == (1, "0", ("n3", "n4"), 2)
    assert (step.srun_host, step.srun_pid) == ("n3", 12)
    assert parse.steps("Job step 1. not found\n", 1) == ()


@given(name=FREE)
def test_a_steps_name_changes_nothing_else(name: str) -> None:
    (step,) = parse.steps(STEP.format(step="0", name=name, srun="n3:12"), 1)
    assert (step.step, step.nodes) == ("0", ("n3", "n4"))
    assert (step.srun_host, step.srun_pid) == ("n3", 12)


def test_a_steps_name_makes_no_step_of_another_job() -> None:
    evil = "x NodeList=n9 Nodes=\nStepId=7.0 NodeList=n1 Nodes=1 SrunHost:Pid=n1:1"
    (step,) = parse.steps(STEP.format(step="0", name=evil, srun="n3:12"), 1)
    assert (step.job, step.nodes, step.srun_pid) == (1, ("n3", "n4"), 12)


# -- the configuration ------------------------------------------------------------------------

CONFIG = """Configuration data as of 2026-11-20T11:41:43
AccountingStorageType   = accounting_storage/none
AuthInfo                = ttl=60,socket=/run/lab/munge.socket.2
ClusterName             = lab
SchedulerParameters     = permit_job_expansion,bf_interval=5
SlurmUser               = slurm(64030)
SlurmctldHost[0]        = ctl(10.0.0.1)
SlurmctldHost[1]        = ctl2
SlurmctldPort           = 6817-6818
SLURM_VERSION           = 22.05.8

Slurmctld(primary) at ctl is UP
"""


def test_the_configuration() -> None:
    info = parse.config(CONFIG)
    assert (info.cluster, info.version, info.slurmctld_port) == ("lab", "22.05.8", 6817)
    assert info.controllers == ("10.0.0.1", "ctl2")
    assert info.slurm_user_uid == 64030
    assert info.munge_socket == "/run/lab/munge.socket.2"
    assert info.permits_expansion


def test_expansion_is_a_word_of_its_own() -> None:
    no = parse.config(CONFIG.replace("permit_job_expansion", "no_permit_job_expansion"))
    assert not no.permits_expansion


def test_what_is_no_configuration_is_refused() -> None:
    with pytest.raises(SlurmError):
        parse.config("slurm_load_ctl_conf error: Unable to contact slurm controller\n")


# -- elements of an array ---------------------------------------------------------------------

ARRAY = "2 1 1\n1 1 2\n3 3 N/A\n"
"""As 22.05 prints an array of two and a plain job: one element has the array's own number."""


@pytest.mark.parametrize(("job", "name"), [(2, "1_1"), (1, "1_2"), (3, "3"), (4, "")])
def test_the_name_that_is_one_jobs_alone(job: int, name: str) -> None:
    assert parse.own_name(ARRAY, job) == name


@pytest.mark.parametrize("text", ["1 1", "x 1 1", "1 1 1 1", "slurm_load_jobs error: x"])
def test_a_name_that_cannot_be_read(text: str) -> None:
    with pytest.raises(SlurmError):
        parse.own_name(text, 1)


def test_the_steps_of_one_element() -> None:
    text = "".join(
        f"StepId={job} UserId=0 State=RUNNING NodeList={nodes} Nodes=2 CPUs=8 Tasks=2 Name=sleep "
        f"SrunHost:Pid={nodes[:2]}:36\n"
        for job, nodes in (("1_1.0", "n1"), ("1_2.0", "n3"), ("1_21.0", "n4"), ("1.0", "n5"))
    )
    (step,) = parse.steps(text, 1, "1_2")
    assert (step.job, step.step, step.nodes) == (1, "0", ("n3",))
    (step,) = parse.steps(text, 1)
    assert step.nodes == ("n5",)


# -- nodes that a job may get -----------------------------------------------------------------


def test_what_a_job_says_of_its_nodes() -> None:
    text = "<m>1<m>n[5-6]<m>a100&ib\n<m>2<m><m>(null)\n<m>3<m>(null)<m>fast\n"
    assert parse.placement(text, "<m>", 1) == (("n5", "n6"), "a100&ib")
    assert parse.placement(text, "<m>", 2) == ((), "")
    assert parse.placement(text, "<m>", 3) == ((), "fast")
    assert parse.placement(text, "<m>", 4) == ((), "")
    with pytest.raises(SlurmError):
        parse.placement("<m>1<m>n1\n", "<m>", 1)
