"""Steps that tasks report: the rule of a hang, its culprit, slow nodes; where steps come from."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from queue import Empty, Queue
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.errors import UsageError
from slurm_resilience.flight.culprit import CulpritRank, HangDiagnosis
from slurm_resilience.resume import attempt
from slurm_resilience.resume.progress import step_sender
from slurm_resilience.resume.progress import step_source as step_source_module
from slurm_resilience.resume.progress.hang_evidence import (
    HangEvidence,
    NodeSigns,
    ProcessSign,
    is_debugged,
    name_culprit,
    stack_lines,
)
from slurm_resilience.resume.progress.hang_rule import (
    COMPILING_STEPS,
    Stall,
    StepRecord,
    learn_limit,
    ranks_behind,
)
from slurm_resilience.resume.progress.node_stacks import choose, main_thread, rank_of
from slurm_resilience.resume.progress.slow_nodes import SlowNodes
from slurm_resilience.resume.progress.stack_gathering import (
    AskedNodes,
    helper_command,
    helper_environment,
    keep,
    make_directory,
    read_kept,
    read_signs,
)
from slurm_resilience.resume.progress.step_listener import StepListener
from slurm_resilience.resume.progress.step_report import (
    LINE_BYTES,
    StepLine,
    parse_line,
)
from slurm_resilience.resume.progress.step_source import WatchedLog, step_source

FLOOR, ENOUGH = 60.0, 10
TOKEN = "a1b2"


# -- lines ------------------------------------------------------------------------------------


@given(
    st.integers(0, 131_071),
    st.one_of(st.none(), st.integers(0, 2**63 - 1)),
    st.floats(0, 1e5, allow_nan=False),
)
def test_a_line_comes_back_as_it_was_sent(rank: int, step: int | None, seconds: float) -> None:
    line = StepLine(rank, step, seconds if step is not None else 0.0)
    told = [] if seconds == 0 or step is None else [f"{seconds:.6f}"]
    words = [TOKEN, str(rank), "pause" if step is None else str(step), *told]
    read = parse_line(" ".join(words).encode(), TOKEN)
    assert read is not None and (read.rank, read.step) == (rank, step)
    assert math.isclose(read.own_seconds, line.own_seconds, abs_tol=1e-6)


@given(st.binary(max_size=LINE_BYTES + 5))
def test_other_words_are_no_step(data: bytes) -> None:
    assert parse_line(data, TOKEN) is None or data.split()[0] == TOKEN.encode()
    parse_line(TOKEN.encode() + b" " + data, TOKEN)


def test_what_a_shell_sends_is_understood() -> None:
    assert parse_line(b"a1b2 3 118", TOKEN) == StepLine(3, 118)
    assert parse_line(b"a1b2 3 118 0.25\n", TOKEN) == StepLine(3, 118, 0.25)
    assert parse_line(b"a1b2 3 pause\n", TOKEN) == StepLine(3, None)
    assert parse_line(b"a1b2 3 118 inf\n", TOKEN) == StepLine(3, 118)
    assert parse_line(b"a1b2 3 118 0 40\n", TOKEN) == StepLine(3, 118, count=40)
    for count in (b"0", b"-3", b"x"):
        assert parse_line(b"a1b2 3 118 0.5 " + count, TOKEN) == StepLine(3, 118, 0.5)
    for wrong in (b"other 3 118", b"a1b2 -3 118", b"a1b2 3", b"a1b2 3 4 5 6 7", b"a1b2 x 4"):
        assert parse_line(wrong, TOKEN) is None


# -- the rule ---------------------------------------------------------------------------------


def record(gaps: list[float], ranks: int = 2) -> tuple[StepRecord, float]:
    """The steps of ranks that step together, with these times between them."""
    steps, now = StepRecord(FLOOR, ENOUGH), 1000.0
    for number, gap in enumerate(gaps):
        now += gap
        for rank in range(ranks):
            steps.hear(StepLine(rank, number), now)
    return steps, now


waits = st.lists(st.floats(0.01, 5000), max_size=60)


@given(waits, st.floats(0, 1e5))
def test_a_step_that_did_not_report_enough_is_never_a_hang(gaps: list[float], wait: float) -> None:
    steps, now = record(gaps[: ENOUGH - 1])
    assert steps.stall(now + wait) is None


@given(waits)
def test_no_wait_that_was_seen_before_is_a_hang(gaps: list[float]) -> None:
    steps, now = record(gaps)
    seen = gaps[COMPILING_STEPS + 1 :]
    assert steps.stall(now + max(seen, default=0.0)) is None


@given(waits)
def test_a_hang_is_found_within_the_bound(gaps: list[float]) -> None:
    steps, now = record([*gaps, *[1.0] * ENOUGH])
    bound = max(FLOOR, max([*gaps, 1.0]) + 3600.0)
    stall = steps.stall(now + bound + 0.01)
    assert stall is not None and stall.limit <= bound + 0.01
    assert stall.seconds > stall.limit >= FLOOR


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1, 1e4))
def test_who_waited_longer_has_more_time(one: float, other: float, floor: float) -> None:
    low, high = sorted((one, other))
    assert floor <= learn_limit(low, floor) <= learn_limit(high, floor)
    assert learn_limit(high, floor) >= high


def test_a_pause_has_no_limit_until_that_rank_steps_again() -> None:
    steps, now = record([1.0] * 20)
    steps.hear(StepLine(1, None), now)
    assert steps.stall(now + 1e6) is None
    steps.hear(StepLine(0, 20), now + 5.0)
    assert steps.stall(now + 1e6) is None
    steps.hear(StepLine(1, 20), now + 5000.0)
    assert steps.longest == 1.0, "a pause teaches nothing"
    assert steps.stall(now + 5000.0 + FLOOR + 1) is not None


def test_the_same_step_told_again_is_no_progress() -> None:
    steps, now = record([1.0] * 20)
    for later in range(1, 100):
        assert not steps.hear(StepLine(0, 19), now + later)
    assert steps.stall(now + FLOOR + 1) is not None
    assert steps.hear(StepLine(0, 0), now + FLOOR + 2), "a new epoch counts anew"


def test_the_first_steps_compile_and_teach_nothing() -> None:
    steps, _ = record([1.0, 400.0, 400.0, *[1.0] * 20])
    assert steps.longest == 1.0
    assert steps.due(0.0) is not None


def test_a_line_that_stands_for_several_steps_counts_them() -> None:
    """A program with short steps tells of several in one line."""
    steps = StepRecord(FLOOR, ENOUGH)
    steps.hear(StepLine(0, 1), 0.0)
    steps.hear(StepLine(0, 5000), 0.5)
    assert steps.due(0.5) is None, "a number is no count: it may be that of a sample"
    steps.hear(StepLine(0, 5100, count=ENOUGH), 1.0)
    assert steps.stall(1.0 + FLOOR + 1) is not None


def test_forgiven_time_does_not_count() -> None:
    steps, now = record([1.0] * 20)
    steps.forgive(now + 5000)
    assert steps.stall(now + 5000 + FLOOR) is None
    assert steps.stall(now + 5001 + FLOOR) is not None


def test_few_ranks_are_behind_many() -> None:
    assert ranks_behind({0: 9, 1: 9, 2: 8, 3: 9}) == (2,)
    assert ranks_behind({0: 9, 1: 8}) == (1,)
    assert ranks_behind({0: 9, 1: 8, 2: 7, 3: 6}) == ()
    assert ranks_behind({0: 9, 1: 9}) == ranks_behind({0: 9}) == ranks_behind({-1: 3}) == ()


# -- the culprit ------------------------------------------------------------------------------


def at(rank: int, state: str = "S", **more: object) -> ProcessSign:
    return ProcessSign(100 + rank, rank, state, **more)  # type: ignore[arg-type]


def evidence(
    processes: dict[str, list[ProcessSign]],
    steps: dict[int, int] | None = None,
    silent: tuple[str, ...] = (),
) -> HangEvidence:
    told = dict.fromkeys(range(4), 9) if steps is None else steps
    nodes = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
    signs = tuple(NodeSigns(name, tuple(found)) for name, found in processes.items())
    return HangEvidence(Stall(70, 60, 1, told), nodes, signs, silent)


WAITING = {"n1": [at(0), at(1)], "n2": [at(2), at(3)]}


def test_the_flight_recorder_comes_first() -> None:
    dumps = HangDiagnosis("not-joined", "rank 3 did not join all_reduce", (CulpritRank(3),))
    found = name_culprit(evidence(WAITING, {0: 8, 1: 9, 2: 9, 3: 9}), dumps)
    assert (found.source, found.ranks, found.node) == ("dumps", (3,), "n2")


@pytest.mark.parametrize(("state", "word"), [("T", "stopped"), ("D", "kernel"), ("Z", "ended")])
def test_a_process_that_cannot_go_on_is_named(state: str, word: str) -> None:
    found = name_culprit(evidence({"n1": [at(0), at(1)], "n2": [at(2, state), at(3)]}))
    assert (found.source, found.ranks, found.node) == ("process", (2,), "n2")
    assert word in found.reason


def test_a_rank_without_a_process_is_named() -> None:
    found = name_culprit(evidence({"n1": [at(0), at(1)], "n2": [at(3)]}))
    assert (found.source, found.ranks, found.node) == ("process", (2,), "n2")


def test_a_node_that_does_not_answer_is_named() -> None:
    processes = {name: [at(0)] for name in ("n1", "n3")}
    found = name_culprit(evidence(processes, {0: 9}, silent=("n2",)))
    assert (found.source, found.ranks, found.node) == ("silent-node", (2, 3), "n2")


def test_a_rank_that_is_a_step_behind_is_named() -> None:
    found = name_culprit(evidence(WAITING, {0: 9, 1: 9, 2: 9, 3: 8}))
    assert (found.source, found.ranks, found.node) == ("behind", (3,), "n2")
    assert "step 8, the others 9" in found.reason


def test_the_only_one_that_does_another_thing_is_named() -> None:
    there = ("all_reduce (torch/distributed.py:41)", "step (train.py:9)")
    other = ("read (data.py:7)",)
    rows = [at(rank, python_stack=other if rank == 1 else there) for rank in range(4)]
    found = name_culprit(evidence({"n1": rows[:2], "n2": rows[2:]}))
    assert (found.source, found.ranks, found.node) == ("differs", (1,), "n1")
    lines = stack_lines(evidence({"n1": rows[:2], "n2": rows[2:]}))
    assert lines[0].startswith("rank 1: read (data.py:7)") and "0, 2-3" in lines[1]


def test_where_all_are_alike_no_rank_is_named() -> None:
    for state in "SDR":
        rows = {"n1": [at(0, state), at(1, state)], "n2": [at(2, state), at(3, state)]}
        assert name_culprit(evidence(rows)).source == "none"
    assert name_culprit(evidence({})).ranks == ()


def test_a_debugger_is_seen() -> None:
    assert is_debugged(evidence({"n1": [at(0, "t")]}))
    assert not is_debugged(evidence(WAITING))


# -- slow nodes -------------------------------------------------------------------------------

NODES = {rank: f"n{rank // 2 + 1}" for rank in range(8)}


def test_a_node_slowed_by_half_is_named_within_100_steps_and_no_other() -> None:
    for seed in range(50):
        random, slow, said = Random(seed), SlowNodes(), []
        for step in range(100):
            for rank in range(8):
                own = random.lognormvariate(0.0, 0.1) * (2.0 if rank in (4, 5) else 1.0)
                slow.hear(StepLine(rank, step, own))
            said += slow.news(NODES)
        assert said and all(text.startswith("n3 (ranks 4-5)") for text in said), said
        assert len(said) <= 2, "each change is said once"


def test_ordinary_jitter_names_no_node_in_1000_runs() -> None:
    for seed in range(1000):
        random, slow = Random(seed), SlowNodes()
        spread = random.choice((0.02, 0.1, 0.25))
        for step in range(60):
            for rank in range(8):
                own = random.lognormvariate(0.0, spread)
                if random.random() < 0.01:
                    own *= 20  # a checkpoint, a garbage collection
                slow.hear(StepLine(rank, step, own))
            if step % 10 == 0:
                assert slow.news(NODES) == [], (seed, spread)


def test_a_node_that_recovers_is_told_once() -> None:
    slow = SlowNodes()
    for step in range(200):
        for rank in range(8):
            slow.hear(StepLine(rank, step, 2.0 if rank == 7 and step < 60 else 1.0))
        if step == 59:
            assert slow.news(NODES)[0].startswith("n4 (rank 7) holds up the others: 2 s")
    assert slow.news(NODES) == ["n4 (rank 7) is as fast as the others again"]
    assert slow.news(NODES) == []


def test_lines_that_come_seldom_stand_for_the_steps_between() -> None:
    slow = SlowNodes()
    for step in (0, 20, 40):
        for rank in range(4):
            slow.hear(StepLine(rank, step, 2.0 if rank == 3 else 1.0))
    assert [one.seat for one in slow.slow()] == [3]


# -- where steps come from --------------------------------------------------------------------


def test_a_watched_file_and_a_pattern_in_the_log_tell_steps(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("step 5\n")
    file = step_source("file:loss.txt", tmp_path, None)
    lines = step_source(r"log:step (\d+)", tmp_path, log)
    assert file is not None and lines is not None and step_source("", tmp_path, log) is None
    assert file.look() == lines.look() == []
    (tmp_path / "loss.txt").write_text("1")
    with log.open("a") as more:
        more.write("nothing\nstep 6\nsres: step 99\nstep 7\nste")
    assert file.look() == [StepLine(-1, 1, has_number=False)] and file.look() == []
    assert lines.look() == [StepLine(-1, 7)]
    with log.open("a") as more:
        more.write("p 8\n")
    assert lines.look() == [StepLine(-1, 8)]
    log.write_text("step 1\n")
    assert lines.look() == [StepLine(-1, 1)], "it was emptied"


def test_a_progress_bar_writes_its_line_anew(tmp_path: Path) -> None:
    log = tmp_path / "slurm-1.out"
    log.write_bytes(b"")
    lines = WatchedLog(re.compile(rb"(\d+)/1000"), log)
    log.write_bytes(b"\r1/1000 [00:01]\r2/1000 [00:02]\r3/1000")
    assert lines.look() == [StepLine(-1, 2)]


def test_lines_that_come_in_lots_are_no_hang_in_between(tmp_path: Path) -> None:
    """A pipe gets the words of print() in lots of 8 KiB."""
    log = tmp_path / "slurm-1.out"
    log.write_bytes(b"")
    lines, record = WatchedLog(re.compile(rb"step (\d+)"), log), StepRecord(600.0, 10)
    for lot in range(20):
        with log.open("a") as more:
            more.writelines(f"step {200 * lot + step}\n" for step in range(200))
        now = 2000.0 * lot
        assert record.stall(now) is None
        for line in lines.look():
            record.hear(line, now)
    assert record.limit == 5600.0


def test_a_pattern_that_takes_for_ever_does_not_stop_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step_source_module, "SEARCH_SECONDS", 0.05)
    log = tmp_path / "slurm-1.out"
    log.write_bytes(b"")
    lines = WatchedLog(re.compile(rb"(a+)+$"), log)
    log.write_bytes(b"a" * 4000 + b"b\n")
    for _ in range(3):
        assert lines.look() == [StepLine(-1, None)]
    assert capfd.readouterr().err.count("no steps are read from the log any more") == 1


def test_a_pipe_in_the_place_of_the_log_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "out")
    assert WatchedLog(re.compile(rb"x"), tmp_path / "out").look() == []


def test_a_pattern_without_a_number_counts_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    lines = WatchedLog(re.compile(rb"loss"), log)
    for count in (1, 2):
        with log.open("a") as more:
            more.write("loss 0.5\n")
        assert lines.look() == [StepLine(-1, count, has_number=False)]


@pytest.mark.parametrize("word", ["x", "file:", "log:(", "tail:x", "log:step"])
def test_a_source_that_is_none_is_refused(tmp_path: Path, word: str) -> None:
    with pytest.raises(UsageError, match="auto-resume-progress"):
        step_source(word, tmp_path, None)


# -- gathering --------------------------------------------------------------------------------


def test_a_helper_step_takes_nothing_from_the_step() -> None:
    words = helper_command("/usr/bin/srun", AskedNodes(7, ("n1", "n2")), "7.0.1", "/d", "/py")
    assert "--overlap" in words and "--nodelist=n[1-2]" in words and "--jobid=7" in words
    assert words[-2:] == ["7.0.1", "/d"]
    environment = {"SLURM_NTASKS": "8", "SLURM_CONF": "/c", "PATH": "/bin", "SRES_TOKEN": "x"}
    assert helper_environment(environment) == {"SLURM_CONF": "/c", "PATH": "/bin"}


def test_the_largest_process_of_each_rank_comes_first_and_launchers_are_none() -> None:
    assert rank_of({"SLURM_PROCID": "3"}, launched=False) == 3
    assert rank_of({"SLURM_PROCID": "0"}, launched=True) is None
    assert rank_of({"SLURM_PROCID": "0", "RANK": "5"}, launched=True) == 5
    many = [(10_000_000 + n, {"SLURM_PROCID": str(n % 20)}) for n in range(200)]
    chosen, left_out = choose(many)
    assert {rank for _, rank in chosen} == set(range(20))
    assert len(chosen) + left_out == 200


def test_only_the_main_threads_frames_are_told() -> None:
    text = (
        'Thread 12 (idle): "worker"\n    get (queue.py:1)\nThread 11 (idle): "MainThread"\n'
        "    wait (threading.py:2)\n    main (train.py:3)\n"
    )
    assert main_thread(text) == ["wait (threading.py:2)", "main (train.py:3)"]


def test_what_was_gathered_is_kept_and_read_again(tmp_path: Path) -> None:
    fence = tmp_path / "job-7-1"
    fence.mkdir()
    directory = make_directory(str(fence), "7.0.1", 0.0)
    found = HangEvidence(
        Stall(70, 60, 1, {0: 3}), {0: "n1"}, (NodeSigns("n1", (at(0),)),), directory=directory
    )
    keep(found)
    assert read_kept(Path(directory)) == found
    assert read_kept(tmp_path) is None
    assert make_directory("", "7.0.1", 0.0) == ""


def test_a_nodes_words_that_are_none_are_left_out() -> None:
    assert [one.node for one in read_signs([b'{"node":"n1"}', b"srun: x", b"", b"[]"])] == ["n1"]


# -- the sockets between them -----------------------------------------------------------------


def test_a_task_tells_its_steps_to_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: Queue[StepLine] = Queue()
    listener = StepListener()
    told = listener.expect("127.0.0.1", heard.put)
    monkeypatch.setattr(step_sender, "_sender", None)
    monkeypatch.setenv("SRES_PROGRESS", told)
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("SRES_TOKEN", "7.0.1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    attempt.step(12, 0.25)
    assert heard.get(timeout=10) == StepLine(3, 12, 0.25)
    attempt.pause()
    assert heard.get(timeout=10) == StepLine(3, None)
    # Another attempt has another token: what is left of this one is not heard any more.
    listener.expect("127.0.0.1", heard.put)
    attempt.step(13)
    with pytest.raises(Empty):
        heard.get(timeout=1)


def test_short_steps_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: Queue[StepLine] = Queue()
    listener = StepListener()
    monkeypatch.setattr(step_sender, "_sender", None)
    monkeypatch.setenv("SRES_PROGRESS", listener.expect("127.0.0.1", heard.put))
    monkeypatch.setenv("RANK", "0")
    for step in range(1, 101):
        step_sender.note(str(step))
    lines = [heard.get(timeout=10)]
    while lines[-1].step != 100:
        lines.append(heard.get(timeout=10))
    assert sum(line.count for line in lines) == 100 and len(lines) < 100


def test_without_a_supervisor_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_sender, "_sender", None)
    for told in ("", "x", "127.0.0.1 x y", "127.0.0.1 99999999 y"):
        monkeypatch.setenv("SRES_PROGRESS", told)
        step_sender.note("1")
        monkeypatch.setattr(step_sender, "_sender", None)
