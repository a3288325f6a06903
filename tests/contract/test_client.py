"""The behaviour of every Slurm client: the same tests on the fake, Slurm's commands and pyslurm."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from slurm_resilience.errors import NotFound, SlurmError
from slurm_resilience.model import REPLACE, Job, Node
from slurm_resilience.simulate.cluster.sim_slurm import SimSlurm

from .conftest import World, step_of

Running = Callable[..., Job]
HELPER_LIMIT = 60.0
"""Seconds: what a helper is given in case that nothing else ends it."""


def of(world: World, name: str) -> Node:
    """A node, from both ways of reading it, which must agree."""
    one = world.client.node(name)
    (other,) = (node for node in world.client.nodes() if node.name == name)
    assert (one.base, one.flags, one.reason) == (other.base, other.flags, other.reason)
    return other


def gone(world: World, job_id: int) -> bool:
    try:
        return not world.client.job(job_id)
    except NotFound:
        return True


def over(world: World, job_id: int) -> Job | None:
    found = world.client.ended_job(job_id)
    return found if found.state != "COMPLETING" else None


# -- nodes ------------------------------------------------------------------------------------


def test_nodes_as_they_are_configured(world: World) -> None:
    nodes = world.client.nodes()
    assert [node.name for node in nodes] == ["n1", "n2", "n3", "n4"]
    for node in nodes:
        assert (node.base, node.flags, node.reason, node.reason_at) == ("IDLE", frozenset(), "", "")
        assert (node.cpus, node.memory, node.gres) == (4, 1000, "")
        assert node.is_available and not node.has_work
        assert node.address and node.port > 0


def test_where_slurm_knows_no_topology_there_are_no_failure_domains(world: World) -> None:
    assert world.client.domains() == {}


def test_a_node_that_does_not_exist(world: World) -> None:
    with pytest.raises(NotFound):
        world.client.node("n9")
    with pytest.raises(NotFound):
        world.client.set_node(["n9"], state="fail", reason=REPLACE)
    with pytest.raises(NotFound):
        world.client.set_comment(["n9"], "x")


def test_an_idle_node_is_failed_and_resumed(world: World) -> None:
    world.client.set_node(["n2"], state="fail", reason=REPLACE)
    node = of(world, "n2")
    assert node.state == "IDLE+FAIL"
    assert (node.reason, node.reason_by, node.requested_action) == (REPLACE, "root", REPLACE)
    assert node.reason_at
    assert node.is_fail and not node.is_available
    world.client.set_node(["n2"], state="resume")
    world.until(lambda: of(world, "n2").is_available, "n2 is back")
    assert of(world, "n2").reason == ""


def test_a_resumed_node_that_goes_down_again_shows_nothing_of_its_old_reason(world: World) -> None:
    """24.11 keeps the reason of a resumed node, and writes the next one behind it."""
    world.client.set_node(["n2"], state="fail", reason=REPLACE)
    world.client.set_node(["n2"], state="resume")
    world.until(lambda: of(world, "n2").is_available, "n2 is back")
    world.client.set_node(["n2"], state="drain", reason="fan")
    assert of(world, "n2").reason == "fan"


@pytest.mark.parametrize("state", ["fail", "down", "drain"])
def test_a_state_that_needs_a_reason_is_refused_without_one(world: World, state: str) -> None:
    with pytest.raises(SlurmError):
        world.client.set_node(["n2"], state=state)
    assert of(world, "n2").is_available


def test_resuming_a_node_in_service_is_refused(world: World) -> None:
    with pytest.raises(SlurmError):
        world.client.set_node(["n2"], state="resume")


def test_down_keeps_fail_and_drain_replaces_it(world: World) -> None:
    world.client.set_node(["n2"], state="fail", reason="a")
    world.client.set_node(["n2"], state="down", reason="b")
    node = of(world, "n2")
    assert node.is_down and node.is_fail and node.reason == "b"
    world.client.set_node(["n3"], state="fail", reason="a")
    world.client.set_node(["n3"], state="drain", reason="b")
    assert of(world, "n3").is_drain and not of(world, "n3").is_fail


def test_failing_a_node_again_is_allowed(world: World) -> None:
    for _ in range(2):
        world.client.set_node(["n2"], state="fail", reason=REPLACE)
    assert of(world, "n2").state == "IDLE+FAIL"


@pytest.mark.parametrize(
    "reason",
    [
        "Action:Replace ",
        "see ticket [4711@ops]",
        "State=DOWN Gres=gpu:8 OS=no",
        "quoted \"so\" and 'so'",
        "x Comment=y",
        "x [root@2020-01-01T00:00:00] y",
    ],
)
def test_a_reason_comes_back_as_it_was_given(world: World, reason: str) -> None:
    world.client.set_node(["n2"], state="fail", reason=reason)
    node = of(world, "n2")
    assert node.reason == reason
    assert node.reason_by == "root"
    assert (node.state, node.gres, node.comment) == ("IDLE+FAIL", "", "")
    assert not node.requested_action


def test_a_reason_of_several_lines_blinds_nobody(world: World) -> None:
    world.client.set_node(["n2"], state="drain", reason="one\ntwo a=b\nthree")
    assert of(world, "n2").reason == "one\ntwo a=b\nthree"
    assert len(world.client.nodes()) == 4


def test_a_comment_of_several_lines_is_no_other_field(world: World) -> None:
    comment = "one\ntwo a=b Reason=Action:Replace State=DOWN"
    world.client.set_comment(["n2"], comment)
    node = of(world, "n2")
    assert node.comment == comment
    assert (node.state, node.reason) == ("IDLE", "")


def test_a_reason_alone_stays_only_on_a_node_out_of_service(world: World) -> None:
    world.client.set_node(["n2"], reason=REPLACE)
    if world.client.info().version.startswith("24.11"):
        # Seen there alone. A reason counts on a node that is out of service.
        assert of(world, "n2").is_available
    else:
        assert of(world, "n2").reason == ""
    world.client.set_node(["n2"], state="fail", reason="first")
    world.client.set_node(["n2"], reason="second")
    assert of(world, "n2").reason == "second"


def test_power_loss_is_not_noticed_at_once(world: World) -> None:
    world.power_off("n2")
    assert of(world, "n2").base == "IDLE"


# -- jobs -------------------------------------------------------------------------------------


def test_a_running_job(world: World, running: Running) -> None:
    job = running(2)
    assert (job.uid, job.state, job.num_nodes, job.restarts) == (0, "RUNNING", 2, 0)
    assert len(job.nodes) == 2 and job.batch_host == job.nodes[0]
    assert job.is_batch and job.requeue and job.exclusive and not job.is_zombie
    assert job.gres == ""
    assert [known.id for known in world.client.jobs()] == [job.id]
    assert all(of(world, name).state == "ALLOCATED" for name in job.nodes)
    (step,) = (step for step in world.client.steps(job.id) if step.step == "0")
    assert step.nodes == job.nodes


def test_a_job_that_shares_its_nodes(running: Running) -> None:
    assert not running(1, exclusive=False).exclusive


def test_an_interactive_job(running: Running) -> None:
    job = running(1, batch=False)
    assert not job.is_batch and not job.is_zombie


def test_a_job_that_does_not_exist(world: World) -> None:
    for ask in (world.client.job, world.client.requeue, world.client.start_now):
        with pytest.raises(NotFound):
            ask(999)
    with pytest.raises(NotFound):
        world.client.shrink(999, ["n1"])
    assert world.client.steps(999) == ()
    # What is to end has ended.
    world.client.cancel_job(999)
    world.client.cancel_step(999, "0")
    world.client.cancel_step(999, "0", "TERM")


def test_a_pending_job_has_no_nodes_and_no_steps(world: World, running: Running) -> None:
    running(4)
    waiting = world.submit(2)
    job = world.client.job(waiting)
    assert (job.state, job.nodes, job.batch_host) == ("PENDING", (), "")
    assert world.client.steps(waiting) == ()
    assert {known.id for known in world.client.jobs()} >= {waiting}


def test_failing_a_busy_node_leaves_its_job_alone(world: World, running: Running) -> None:
    job = running(2)
    world.client.set_node([job.nodes[1]], state="fail", reason=REPLACE)
    node = of(world, job.nodes[1])
    assert node.state == "ALLOCATED+FAIL"
    assert node.has_work and not node.is_available
    assert world.client.job(job.id).state == "RUNNING"


def test_shrinking_a_job(world: World, running: Running) -> None:
    job = running(3)
    with pytest.raises(NotFound):
        world.client.shrink(job.id, ["n9"])
    world.shrink(job.id, job.nodes[:2])
    after = world.client.job(job.id)
    assert (after.state, after.nodes, after.restarts) == ("RUNNING", job.nodes[:2], 0)
    world.until(lambda: of(world, job.nodes[2]).is_available, "the node is given back")


def test_down_requeues_a_job_that_dies_with_its_node(world: World, running: Running) -> None:
    job = running(2)
    world.power_off(job.nodes[1])
    world.client.set_node([job.nodes[1]], state="down", reason=REPLACE)
    world.until(lambda: world.client.job(job.id).state == "PENDING", "it is requeued")
    again = world.client.job(job.id)
    assert (again.restarts, again.nodes) == (1, ())
    world.client.start_now(job.id)
    after = world.until(lambda: _running(world, job.id), "it runs again, at once")
    assert job.nodes[1] not in after.nodes


def test_down_ends_a_job_that_may_not_be_requeued(world: World, running: Running) -> None:
    job = running(2, requeue=False)
    assert not job.requeue
    world.power_off(job.nodes[1])
    world.client.set_node([job.nodes[1]], state="down", reason=REPLACE)
    world.until(lambda: gone(world, job.id), "it is over")


def test_down_takes_the_node_out_of_a_job_with_no_kill(world: World, running: Running) -> None:
    job = running(3, no_kill=True)
    world.power_off(job.nodes[2])
    world.client.set_node([job.nodes[2]], state="down", reason=REPLACE)
    world.until(lambda: len(world.client.job(job.id).nodes) == 2, "the job is smaller")
    after = world.client.job(job.id)
    assert (after.state, after.nodes) == ("RUNNING", job.nodes[:2])


def test_a_job_that_outlives_its_batch_host_is_a_zombie(world: World, running: Running) -> None:
    job = running(3, no_kill=True)
    world.power_off(job.nodes[0])
    world.client.set_node([job.nodes[0]], state="down", reason=REPLACE)
    world.until(lambda: world.client.job(job.id).is_zombie, "it is a zombie")
    world.client.requeue(job.id)
    world.until(lambda: world.client.job(job.id).state == "PENDING", "it is requeued")
    assert world.client.job(job.id).restarts == 1


def test_requeue_waits_until_it_is_told_to_start(world: World, running: Running) -> None:
    job = running(2)
    world.client.requeue(job.id)
    world.until(lambda: world.client.job(job.id).state == "PENDING", "it is requeued")
    with pytest.raises(SlurmError):
        world.client.requeue(job.id)
    # Within the second in which the job ended slurmd takes the new credential for the revoked one,
    # and Slurm fails the job.
    ended = int(time.time())
    if world.is_real:
        world.until(lambda: int(time.time()) > ended + 1, "another second")
    world.client.start_now(job.id)
    world.until(lambda: _running(world, job.id), "it runs again")
    assert world.client.job(job.id).restarts == 1


def test_what_may_not_be_requeued(world: World, running: Running) -> None:
    for how in ({"requeue": False}, {"batch": False}):
        job = running(1, **how)
        with pytest.raises(SlurmError):
            world.client.requeue(job.id)
        assert world.client.job(job.id).state == "RUNNING"


def test_cancelling_a_job(world: World, running: Running) -> None:
    job = running(2)
    world.client.cancel_job(job.id, "that-had-its-number-before")
    assert world.client.job(job.id).state == "RUNNING"
    world.client.cancel_job(job.id)
    world.until(lambda: gone(world, job.id), "it is over")
    world.until(lambda: not any(n.has_work for n in world.client.nodes()), "nodes are free")


def test_a_job_that_is_over_tells_how_it_ended(world: World, running: Running) -> None:
    """Slurm remembers it for a while (MinJobAge)."""
    if isinstance(world.client, SimSlurm):
        return  # supervisors alone ask this
    job = running(2)
    world.client.cancel_job(job.id)
    world.until(lambda: gone(world, job.id), "it is over")
    ended = world.until(lambda: over(world, job.id), "Slurm tells how")
    assert (ended.state, ended.nodes, ended.uid) == ("CANCELLED", job.nodes, job.uid)
    with pytest.raises(NotFound):
        world.client.ended_job(999_999)


def test_a_job_that_nothing_preempts(world: World, running: Running) -> None:
    if isinstance(world.client, SimSlurm):
        return  # supervisors alone ask this
    job = running(2)
    assert not world.client.is_preempted(job.id)


def test_ending_a_step_leaves_the_allocation(world: World, running: Running) -> None:
    job = running(2)
    world.client.cancel_step(job.id, "0")
    world.until(lambda: not step_of(world.client, job.id), "the step is over")
    assert world.client.job(job.id).state == "RUNNING"
    world.client.cancel_step(job.id, "0")


# -- a node for a node ------------------------------------------------------------------------


def test_a_node_is_swapped(world: World, running: Running) -> None:
    job = running(3)
    (spare,) = {node.name for node in world.client.nodes()} - set(job.nodes)
    world.shrink(job.id, job.nodes[:2])
    world.client.set_node([job.nodes[2]], state="fail", reason=REPLACE)
    # An earlier job may be ending there still.
    world.until(
        lambda: not any(node.has_work for node in world.client.nodes() if node.name == spare),
        "the spare is free",
    )
    # Slurm begins an allocation in a turn of its scheduler, the next of which may be a minute away.
    helper = world.client.allocate_for(world.client.job(job.id), 1, 120.0)
    nodes = world.client.merge(helper, job.id)
    assert set(nodes) == {*job.nodes[:2], spare}
    assert set(world.client.job(job.id).nodes) == set(nodes)
    world.until(lambda: gone(world, helper), "the helper is gone")


def sallocs_for(job: int) -> list[int]:
    """The processes that hold an allocation, or wait for one, that is to expand a job of this
    test's own Slurm."""
    found = []
    for process in psutil.process_iter(["cmdline", "name"]):
        words = process.info["cmdline"] or ()
        if process.info["name"] == "salloc" and f"--dependency=expand:{job}" in words:
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == os.environ.get("SLURM_CONF"):
                    found.append(process.pid)
    return found


def test_a_helper_ends_with_the_process_that_asked_for_it(world: World, running: Running) -> None:
    """However it ends: a helper that was not merged would keep its node for the job's time."""
    if not world.is_real:
        pytest.skip("the fake has no processes")
    job = running(3)
    wanted = world.client.job(job.id)
    pid = os.fork()
    if pid == 0:
        try:
            world.client.allocate_for(wanted, 1, 30.0)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    killed = time.monotonic()
    world.until(lambda: [j.id for j in world.client.jobs()] == [job.id], "no helper is left")
    assert time.monotonic() - killed < HELPER_LIMIT, "it ended at its limit alone"
    world.until(lambda: not sallocs_for(job.id), "no salloc is left")


def test_no_idle_node_is_a_refusal_and_leaves_nothing(world: World, running: Running) -> None:
    job = running(4)
    with pytest.raises(SlurmError):
        world.client.allocate_for(job, 1, 1.0)
    world.until(lambda: [j.id for j in world.client.jobs()] == [job.id], "no helper is left")


# -- the cluster ------------------------------------------------------------------------------


def test_what_slurm_says_of_itself(world: World) -> None:
    info = world.client.info()
    assert info.cluster and info.version.split(".")[0].isdecimal()
    assert info.permits_expansion and info.slurm_user_uid == 0


HOSTILE = (
    "x|y",
    "x\n999|0|RUNNING|n1",
    "x UserId=root(0) NodeList=n[1-4]",
    "%A%U<0>",
    "(null)",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_that_a_user_names_changes_what_is_read(world: World, text: str) -> None:
    if not world.is_real:
        pytest.skip("the fake reads no text")
    words = (f"--job-name={text}", f"--comment={text}", f"--account={text}", f"--qos={text}")
    job_id = world.submit(2, words=words)
    world.until(lambda: world.client.job(job_id).state == "RUNNING", "it runs")
    jobs = world.client.jobs()
    assert [job.id for job in jobs] == [job_id]
    assert (jobs[0].uid, jobs[0].partition, len(jobs[0].nodes)) == (0, "main", 2)
    assert jobs[0].account in (text.lower(), "")  # Slurm folds it
    world.until(lambda: step_of(world.client, job_id), "its step runs")
    assert {step.job for step in world.client.steps(job_id)} == {job_id}


def _running(world: World, job_id: int) -> Job | None:
    world.pass_time()
    job = world.client.job(job_id)
    return job if job.state == "RUNNING" else None
