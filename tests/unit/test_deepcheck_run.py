"""A run keeps nodes, gives them back however it ends, and names the bad one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event

import msgspec
import pytest

from slurm_resilience.cli.deepcheck.ended_in_order import ended_in_order
from slurm_resilience.deepcheck.cluster_level import BOUNDS
from slurm_resilience.deepcheck.collective_math import Sweep, SweepRow
from slurm_resilience.deepcheck.deep_marks import marked_at, status_of
from slurm_resilience.deepcheck.deep_results import DeepOutcome, DeepResult
from slurm_resilience.deepcheck.deep_run import DeepReport, DeepRun
from slurm_resilience.deepcheck.run_options import DeepRunOptions
from slurm_resilience.deepcheck.step_lines import (
    CheckBegun,
    CheckEnded,
    ChecksDone,
    GroupSwept,
    GroupTrouble,
    StepMessage,
    as_lines,
)
from slurm_resilience.deepcheck.step_requests import CollectiveRequest, RankHardware
from slurm_resilience.errors import (
    NotPermitted,
    SlurmError,
    SlurmUnreachable,
    SresError,
    UsageError,
)
from slurm_resilience.model import Node, Severity
from slurm_resilience.slurm.hostlists import expand
from slurm_resilience.slurm.maintenance import StepOrder
from slurm_resilience.slurm.reservations import Reservation

Answer = Callable[[StepOrder], Sequence[StepMessage]]


class StandStill:
    """A clock that only waiting moves on."""

    def __init__(self) -> None:
        self.at = 1_700_000_000.0
        self.waited: list[Callable[[], None]] = []

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at

    def wait(self, event: Event, seconds: float) -> bool:
        self.at += seconds
        if self.waited:
            self.waited.pop(0)()
        return False


class Door:
    """Slurm, whose steps print what a test has them print."""

    def __init__(self, nodes: Sequence[Node], answer: Answer) -> None:
        self.shown = {node.name: node for node in nodes}
        self.answer = answer
        self.done: list[str] = []
        self.refusals: list[str] = []
        self.orders: list[StepOrder] = []
        self.code = 0
        self.words = ""
        self.refused: SresError | None = None
        self.reserved: list[Reservation] = []
        self.unlabelled: SresError | None = None
        self.labels: list[str] = []

    def nodes(self) -> tuple[Node, ...]:
        return tuple(self.shown.values())

    def reservations(self) -> tuple[Reservation, ...]:
        return tuple(self.reserved)

    def reserve(self, name: str, nodes: Sequence[str], minutes: int, user: str) -> None:
        if self.refused is not None:
            raise self.refused
        self.done.append(f"reserve {','.join(nodes)} for {user}")

    def set_comment(self, names: Sequence[str], comment: str) -> None:
        if self.unlabelled is not None:
            raise self.unlabelled
        for name in names:
            self.shown[name] = msgspec.structs.replace(self.shown[name], comment=comment)
            self.labels.append(f"{name} {comment}")

    def set_node(self, names: Sequence[str], *, state: str = "", reason: str = "") -> None:
        self.done.append(f"{state} {','.join(names)} {reason}")

    def release(self, name: str) -> None:
        if self.refusals:
            raise SlurmError(self.refusals.pop())
        self.done.append("release")

    def cancel_jobs_in(self, reservation: str) -> None:
        self.done.append("cancel")

    def start_step(self, order: StepOrder) -> subprocess.Popen[str]:
        self.orders.append(order)
        lines = [
            line
            for number, message in enumerate(self.answer(order))
            for line in as_lines(f"task{number}", message)
        ]
        lines += [self.words]
        program = f"print({chr(10).join(lines)!r}); raise SystemExit({self.code})"
        return subprocess.Popen(
            [sys.executable, "-S", "-c", program], stdout=subprocess.PIPE, text=True
        )


def node(number: int, base: str = "IDLE", **more: object) -> Node:
    return Node(f"n{number}", base, address=f"10.0.0.{number}", **more)  # type: ignore[arg-type]


def run(
    door: Door,
    folder: Path,
    level: str,
    clock: StandStill | None = None,
    options: DeepRunOptions | None = None,
    told: list[str] | None = None,
) -> DeepReport:
    tell = told.append if told is not None else lambda _: None
    names = list(door.shown)
    made = DeepRun(door, clock or StandStill(), options or DeepRunOptions(), folder, tell)
    return made.run(level, names, "root")


def passes(order: StepOrder) -> list[StepMessage]:
    said: list[StepMessage] = []
    for name in order.nodes:
        result = DeepResult("disk", DeepOutcome.PASSED, "fine", output="fio says much")
        said += [CheckBegun(name, "disk"), CheckEnded(name, result), ChecksDone(name)]
    return said


def test_every_node_passes_and_is_given_back(tmp_path: Path) -> None:
    door = Door([node(1), node(2)], passes)
    told: list[str] = []
    report = run(door, tmp_path, "instance", told=told)
    assert [(one.node, one.state) for one in report.nodes] == [("n1", "Passed"), ("n2", "Passed")]
    assert report.exit_code == 0
    assert door.done == ["reserve n1,n2 for root", "cancel", "release"]
    assert "n1: disk passed: fine" in told
    assert "fio says much" in (tmp_path / "n1.log").read_text()


def test_nodes_with_other_gpus_get_a_job_of_their_own(tmp_path: Path) -> None:
    door = Door([node(1, gres="gpu:8"), node(2)], passes)
    assert run(door, tmp_path, "instance").exit_code == 0
    assert {(order.nodes, order.gres) for order in door.orders} == {
        (("n1",), "gpu:8"),
        (("n2",), ""),
    }


def test_busy_and_held_nodes_are_named_and_left_alone(tmp_path: Path) -> None:
    held = node(3, flags=frozenset({"DRAIN"}), reason="a person looks")
    door = Door([node(1), node(2, "ALLOCATED"), held], passes)
    report = run(door, tmp_path, "instance")
    assert [(one.node, one.state) for one in report.nodes] == [
        ("n1", "Passed"),
        ("n2", "Skipped"),
        ("n3", "Skipped"),
    ]
    assert "a person looks" in report.nodes[2].reason
    assert report.exit_code == 12
    assert door.done[0] == "reserve n1 for root"


def test_nothing_is_reserved_where_no_node_is_ready(tmp_path: Path) -> None:
    door = Door([node(1, "ALLOCATED")], passes)
    assert run(door, tmp_path, "instance").exit_code == 12
    assert door.done == []


def test_a_busy_node_is_waited_for(tmp_path: Path) -> None:
    door, clock = Door([node(1, "ALLOCATED")], passes), StandStill()
    clock.waited = [lambda: None, lambda: door.shown.update(n1=node(1))]
    report = run(door, tmp_path, "instance", clock, DeepRunOptions(wait_seconds=60))
    assert report.exit_code == 0
    # No longer than that.
    door = Door([node(1, "ALLOCATED")], passes)
    assert run(door, tmp_path, "instance", options=DeepRunOptions(wait_seconds=60)).exit_code == 12


def test_a_node_that_ends_in_the_middle_is_unjudged(tmp_path: Path) -> None:
    door = Door(
        [node(1), node(2)], lambda order: [*passes(order)[:3], CheckBegun("n2", "cpu_burn")]
    )
    door.code = 1
    report = run(door, tmp_path, "instance")
    second = report.nodes[1]
    assert (second.node, second.state) == ("n2", "Unjudged")
    assert "during cpu_burn without a result (code 1)" in second.reason
    assert report.exit_code == 12


def test_a_node_that_dies_under_the_load_has_failed(tmp_path: Path) -> None:
    def dies(order: StepOrder) -> list[StepMessage]:
        door.shown["n2"] = node(2, "DOWN")
        return [*passes(order)[:3], CheckBegun("n2", "cpu_burn")]

    door = Door([node(1), node(2)], dies)
    report = run(door, tmp_path, "instance")
    assert [(one.state, one.action) for one in report.nodes] == [
        ("Passed", "none"),
        ("Failed", "reboot"),
    ]
    assert report.nodes[1].reason == "it was lost to Slurm during cpu_burn"
    assert report.exit_code == 11


def test_an_interrupt_gives_the_nodes_back(tmp_path: Path) -> None:
    def interrupted(_: StepOrder) -> list[StepMessage]:
        raise KeyboardInterrupt

    door = Door([node(1)], interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(door, tmp_path, "instance")
    assert door.done == ["reserve n1 for root", "cancel", "release"]


def test_an_interrupt_in_the_middle_of_giving_back_does_not_end_it(tmp_path: Path) -> None:
    door = Door([node(1)], passes)
    cancel, interrupts = door.cancel_jobs_in, [KeyboardInterrupt]

    def cancelled(reservation: str) -> None:
        cancel(reservation)
        if interrupts:
            raise interrupts.pop()

    door.cancel_jobs_in = cancelled  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run(door, tmp_path, "instance")
    assert door.done == ["reserve n1 for root", "cancel", "cancel", "release"]


def test_a_lost_terminal_ends_a_run_in_order_and_a_second_signal_changes_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    before = signal.getsignal(signal.SIGINT)
    given_back = []
    with pytest.raises(KeyboardInterrupt), ended_in_order():
        try:
            os.kill(os.getpid(), signal.SIGHUP)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            given_back.append("n1")
    assert given_back == ["n1"]
    assert signal.getsignal(signal.SIGINT) is before
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        with ended_in_order():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_two_runs_at_the_same_moment_do_not_load_the_same_node(tmp_path: Path) -> None:
    """Slurm lets maintenance reservations overlap."""
    door = Door([node(1), node(2)], passes)
    reserve = door.reserve

    def reserved(name: str, nodes: Sequence[str], minutes: int, user: str) -> None:
        reserve(name, nodes, minutes, user)
        door.reserved = [Reservation(name, ("n1", "n2"), 1.0), Reservation("other", ("n2",), 1.0)]

    door.reserve = reserved  # type: ignore[method-assign]
    with pytest.raises(SlurmError, match="n2: kept by reservation other since a moment ago"):
        run(door, tmp_path, "instance")
    assert door.done == ["reserve n1,n2 for root", "cancel", "release"] and not door.orders


def test_a_wait_outlives_a_restart_of_slurm_and_the_end_of_a_node(tmp_path: Path) -> None:
    door = Door([node(1, "ALLOCATED"), node(2, "ALLOCATED")], passes)
    shown, clock, told = door.nodes, StandStill(), list[str]()
    answers: list[object] = [shown, SlurmUnreachable("it restarts"), shown]

    def nodes() -> tuple[Node, ...]:
        answer = answers.pop(0) if len(answers) > 1 else shown
        if isinstance(answer, SresError):
            raise answer
        return shown()

    def changed() -> None:
        door.shown = {"n1": node(1)}

    door.nodes = nodes  # type: ignore[method-assign]
    clock.waited = [lambda: None, changed]
    options = DeepRunOptions(wait_seconds=3600.0)
    report = run(door, tmp_path, "instance", clock, options, told)
    assert told[:2] == ["waiting for the jobs on n[1-2]", "waiting for Slurm: it restarts"]
    states = {one.node: (one.state.value, one.reason) for one in report.nodes}
    assert states["n2"] == ("Skipped", "Slurm does not know it any more")
    assert states["n1"][0] == "Passed"


def test_a_reservation_that_slurm_refused_is_not_removed(tmp_path: Path) -> None:
    door = Door([node(1)], passes)
    door.refused = NotPermitted("Invalid user id")
    with pytest.raises(NotPermitted):
        run(door, tmp_path, "instance")
    assert door.done == []
    # Without an answer it may have been made all the same.
    door.refused = SlurmUnreachable("no answer within 20 s")
    with pytest.raises(SlurmUnreachable):
        run(door, tmp_path, "instance")
    assert door.done == ["cancel", "release"]


def test_a_reservation_that_is_still_in_use_is_tried_again(tmp_path: Path) -> None:
    door = Door([node(1)], passes)
    door.refusals = ["Requested reservation is in use"] * 3
    assert run(door, tmp_path, "instance").exit_code == 0
    assert door.done[-1] == "release"
    told: list[str] = []
    door.refusals = ["Requested reservation is in use"] * 1000
    run(door, tmp_path, "instance", told=told)
    assert "could not be removed (Requested reservation is in use)" in told[-1]


# --- the cluster level ------------------------------------------------------------------------


def cluster_of(
    bandwidth: Callable[[set[str]], float | None], wrong: int = 0
) -> Callable[[StepOrder], list[StepMessage]]:
    """Steps whose groups reach a bandwidth, in GB/s of the algorithm."""

    def answer(order: StepOrder) -> list[StepMessage]:
        request = msgspec.json.decode(order.program[-1], type=CollectiveRequest)
        said: list[StepMessage] = []
        for number, group in enumerate(request.groups):
            members = expand(group.nodes)
            assert group.address == f"10.0.0.{members[0][1:]}"
            rate = bandwidth(set(members))
            if rate is None:
                said.append(GroupTrouble(number, members[0], "RuntimeError: connection reset"))
                continue
            for collective in request.collectives:
                size = request.largest_bytes
                row = SweepRow(size, size // 4, size / rate / 1e9, wrong)
                said.append(GroupSwept(number, Sweep(collective, len(members), (row,))))
        return said

    return answer


def test_the_slow_node_is_named_and_no_other(tmp_path: Path) -> None:
    door = Door(
        [node(number) for number in range(1, 6)],
        cluster_of(lambda members: 0.01 if "n4" in members else 1.0),
    )
    report = run(door, tmp_path, "cluster", options=DeepRunOptions(region="us-west-2"))
    assert {one.node for one in report.nodes if one.state == "Failed"} == {"n4"}
    assert {one.node for one in report.nodes if one.state == "Passed"} == {"n1", "n2", "n3", "n5"}
    assert report.exit_code == 11
    (line,) = report.lines
    said = json.loads(line)
    assert (said["level"], said["node"]) == ("error", "n4")
    assert said["msg"] == (
        "Encountered FaultyInstance. Replace the Instance. Region: us-west-2, InstanceType: "
        "unknown. ERROR:Bandwidth has less than threshold: Expected minimum threshold :0.5,"
        "NCCL Test output Bw: 0.01"
    )
    log = (tmp_path / "cluster.log").read_text()
    assert line in log and "# Out of bounds values : 0 OK" in log
    assert door.done[-1] == "release"


def test_a_node_that_comes_to_no_result_is_named(tmp_path: Path) -> None:
    door = Door(
        [node(number) for number in range(1, 5)],
        cluster_of(lambda members: None if "n2" in members else 1.0),
    )
    report = run(door, tmp_path, "cluster")
    assert {one.node for one in report.nodes if one.state == "Failed"} == {"n2"}


@pytest.mark.parametrize(
    "words",
    [
        "slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-23T17:12:24 ***",
        "srun: error: Unable to allocate resources: Unable to contact slurm controller",
    ],
)
def test_steps_that_are_ended_from_outside_name_no_node(tmp_path: Path, words: str) -> None:
    """Two rounds of pairs came to nothing, for all nodes, and the third one did: each node was
    taken for one that is slow with several good nodes, and its replacement asked for."""
    door = Door([node(number) for number in range(1, 5)], cluster_of(lambda _: 1.0))
    answer = door.answer

    def cancelled(order: StepOrder) -> list[StepMessage]:
        is_ended = len(door.orders) in (2, 3)
        after = "srun: error: n1: task 0: Terminated"
        door.code, door.words = (1, f"{words}\n{after}") if is_ended else (0, "")
        return [] if is_ended else answer(order)

    door.answer = cancelled
    report = run(door, tmp_path, "cluster")
    assert {one.state for one in report.nodes} == {"Unjudged"}
    assert words in report.nodes[0].reason
    assert (report.exit_code, report.trouble, report.lines) == (12, "", ())
    assert len(door.orders) == 2, "a person who cancels a step wants no other one"


def test_a_step_that_a_node_brings_down_is_a_measure(tmp_path: Path) -> None:
    dead = (
        "slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-23T17:12:24 DUE TO NODE n2"
    )
    door = Door(
        [node(number) for number in range(1, 5)],
        cluster_of(lambda members: None if "n2" in members else 1.0),
    )
    door.code, door.words = 1, f"{dead} FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***"
    report = run(door, tmp_path, "cluster")
    assert {one.node for one in report.nodes if one.state == "Failed"} == {"n2"}


def test_a_healthy_cluster_passes(tmp_path: Path) -> None:
    door = Door([node(number) for number in range(1, 5)], cluster_of(lambda _: 1.0))
    report = run(door, tmp_path, "cluster")
    assert report.exit_code == 0 and report.lines == ()


def test_all_nodes_below_the_threshold_are_a_fault_of_the_whole(tmp_path: Path) -> None:
    door = Door([node(number) for number in range(1, 5)], cluster_of(lambda _: 1.0))
    report = run(door, tmp_path, "cluster", options=DeepRunOptions(threshold=80.0))
    assert report.exit_code == 11
    assert {one.state for one in report.nodes} == {"Unjudged"}
    assert "at least 80 is expected, and no node is slower than the others" in report.trouble


def test_a_sweep_without_a_result_is_a_fault_of_the_whole(tmp_path: Path) -> None:
    door = Door(
        [node(number) for number in range(1, 5)],
        cluster_of(lambda members: 1.0 if len(members) == 2 else None),
    )
    report = run(door, tmp_path, "cluster")
    assert {one.state for one in report.nodes} == {"Passed"}
    assert report.exit_code == 11
    assert "connection reset" in report.trouble


def test_a_node_without_torch_is_unjudged_and_the_others_are_judged(tmp_path: Path) -> None:
    speak = cluster_of(lambda _: 1.0)

    def answer(order: StepOrder) -> list[StepMessage]:
        if "n1" in order.nodes:
            return [GroupTrouble(0, "n1", "torch is not installed", missing=True)]
        return speak(order)

    door = Door([node(number) for number in range(1, 6)], answer)
    report = run(door, tmp_path, "cluster")
    states = {one.node: one.state for one in report.nodes}
    assert states.pop("n1") == "Unjudged"
    assert set(states.values()) == {"Passed"}
    assert report.sweeps and report.trouble == ""


def test_where_every_node_lacks_torch_nothing_has_failed(tmp_path: Path) -> None:
    def lacks(order: StepOrder) -> list[StepMessage]:
        text = "torch_neuronx is not installed"
        return [GroupTrouble(0, name, text, missing=True) for name in order.nodes]

    door = Door([node(number) for number in range(1, 4)], lacks)
    report = run(door, tmp_path, "cluster", options=DeepRunOptions(profile="trn1.32xlarge"))
    assert [one.results[0].text for one in report.nodes] == ["torch_neuronx is not installed"] * 3
    assert {one.state for one in report.nodes} == {"Unjudged"}
    assert (report.trouble, report.exit_code) == ("", 12)


@pytest.mark.parametrize(
    ("gres", "profile", "hardware", "tasks", "asked"),
    [
        ("", "", RankHardware.CPU, 1, ""),
        ("gpu:h100:8(S:0-1)", "p5.48xlarge", RankHardware.GPU, 8, "gpu:8"),
        ("", "trn1.32xlarge", RankHardware.NEURON, 1, ""),
        ("gpu:Trainium2:16", "", RankHardware.NEURON, 1, "gpu:16"),
        ("neuron:16", "a type that has no profile", RankHardware.NEURON, 1, ""),
    ],
)
def test_the_type_of_the_nodes_decides_what_is_measured(
    tmp_path: Path, gres: str, profile: str, hardware: RankHardware, tasks: int, asked: str
) -> None:
    door = Door([node(number, gres=gres) for number in (1, 2)], cluster_of(lambda _: 1.0))
    run(door, tmp_path, "cluster", options=DeepRunOptions(profile=profile))
    order = door.orders[0]
    request = msgspec.json.decode(order.program[-1], type=CollectiveRequest)
    assert (request.hardware, order.tasks_per_node, order.gres) == (hardware, tasks, asked)
    assert request.largest_bytes == BOUNDS[hardware].largest_bytes
    assert order.minutes * 60 > request.limit_seconds > request.budget_seconds


def test_one_node_alone_has_no_links_to_others(tmp_path: Path) -> None:
    door = Door([node(1)], passes)
    with pytest.raises(UsageError, match="needs two nodes or more"):
        run(door, tmp_path, "cluster")
    door = Door([node(1), node(2, gres="gpu:8")], passes)
    with pytest.raises(UsageError, match="different GPUs"):
        run(door, tmp_path, "cluster")
    assert door.done == []


def test_the_state_is_kept_in_the_comment_beside_all_else(tmp_path: Path) -> None:
    noted = node(2, comment="RMA 4711 [sres health-status=validating]")
    door = Door([node(1), noted], lambda order: passes(order)[:3])
    run(door, tmp_path, "instance")
    at = "deep-check-at=2023-11-14T22:13:20Z"
    assert door.labels == [
        f"n1 [sres deep-check-status=InProgress {at}]",
        f"n2 RMA 4711 [sres health-status=validating deep-check-status=InProgress {at}]",
        f"n1 [sres deep-check-status=Passed {at}]",
        f"n2 RMA 4711 [sres health-status=validating deep-check-status=Unjudged {at}]",
    ]
    assert [status_of(one) for one in door.nodes()] == ["Passed", "Unjudged"]
    assert marked_at(door.shown["n1"]) == StandStill().at


def test_a_run_that_a_person_ends_leaves_no_node_in_progress(tmp_path: Path) -> None:
    def end(order: StepOrder) -> Sequence[StepMessage]:
        raise KeyboardInterrupt

    door = Door([node(1), node(2)], end)
    with pytest.raises(KeyboardInterrupt):
        run(door, tmp_path, "instance")
    assert [status_of(one) for one in door.nodes()] == ["Unjudged", "Unjudged"]


def test_a_label_that_slurm_does_not_take_ends_no_run_and_is_told_once(tmp_path: Path) -> None:
    door, told = Door([node(1)], passes), list[str]()
    door.unlabelled = NotPermitted("Invalid user id")
    assert run(door, tmp_path, "instance", told=told).exit_code == 0
    assert [line for line in told if "label" in line] == [
        "the label deep-check-status cannot be written: Invalid user id"
    ]


def test_a_node_that_is_skipped_keeps_its_label(tmp_path: Path) -> None:
    busy = node(1, "ALLOCATED", comment="[sres deep-check-status=Passed]")
    door = Door([busy], passes)
    run(door, tmp_path, "instance")
    assert door.labels == []
    assert (status_of(busy), marked_at(busy)) == ("Passed", 0.0)


def fails(check: str, action: Severity, *bad: str) -> Answer:
    def answer(order: StepOrder) -> list[StepMessage]:
        said: list[StepMessage] = []
        for name in order.nodes:
            outcome = DeepOutcome.FAILED if name in bad else DeepOutcome.PASSED
            result = DeepResult(check, outcome, "as it is", action)
            said += [CheckBegun(name, check), CheckEnded(name, result), ChecksDone(name)]
        return said

    return answer


ASIDE = DeepRunOptions(set_aside=True)


@pytest.mark.parametrize(
    ("action", "asked"),
    [
        (Severity.REPLACE, "Action:Replace"),
        (Severity.REBOOT, "Action:Reboot"),
        (Severity.RESET, "Action:Reboot"),
    ],
)
def test_a_failed_node_is_set_aside_before_it_is_given_back(
    tmp_path: Path, action: Severity, asked: str
) -> None:
    door = Door([node(1), node(2)], fails("gpu_burn", action, "n2"))
    assert run(door, tmp_path, "instance", options=ASIDE).exit_code == 11
    assert door.done == ["reserve n1,n2 for root", f"fail n2 {asked}", "cancel", "release"]
    # A person is asked as long as the option is not given.
    door = Door([node(1), node(2)], fails("gpu_burn", action, "n2"))
    assert run(door, tmp_path, "instance").exit_code == 11
    assert door.done == ["reserve n1,n2 for root", "cancel", "release"]


def test_a_node_that_a_person_has_taken_meanwhile_is_left_alone(tmp_path: Path) -> None:
    def answer(order: StepOrder) -> Sequence[StepMessage]:
        door.shown["n1"] = node(1, flags=frozenset({"DRAIN"}), reason="RMA 4711")
        return fails("disk", Severity.REPLACE, "n1")(order)

    door, told = Door([node(1)], answer), list[str]()
    run(door, tmp_path, "instance", options=ASIDE, told=told)
    assert door.done == ["reserve n1 for root", "cancel", "release"]
    assert "n1: it is left as it is: Slurm shows it IDLE+DRAIN" in told


def test_what_most_nodes_fail_is_rather_a_bad_check(tmp_path: Path) -> None:
    told = list[str]()
    door = Door(
        [node(n) for n in (1, 2, 3, 4)], fails("dcgm_r4", Severity.REPLACE, "n1", "n2", "n3")
    )
    run(door, tmp_path, "instance", options=ASIDE, told=told)
    assert not [line for line in door.done if line.startswith("fail")]
    assert sum("most nodes of this run fail dcgm_r4" in line for line in told) == 3
    # Two of many are bad nodes.
    door = Door([node(n) for n in (1, 2, 3, 4)], fails("dcgm_r4", Severity.REPLACE, "n1", "n2"))
    run(door, tmp_path, "instance", options=ASIDE)
    assert [line for line in door.done if line.startswith("fail")] == [
        "fail n1 Action:Replace",
        "fail n2 Action:Replace",
    ]


def test_a_failure_that_calls_for_no_repair_sets_no_node_aside(tmp_path: Path) -> None:
    door = Door([node(1)], fails("collectives", Severity.MONITOR, "n1"))
    run(door, tmp_path, "instance", options=ASIDE)
    assert door.done == ["reserve n1 for root", "cancel", "release"]
