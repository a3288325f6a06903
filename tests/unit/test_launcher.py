"""The launcher's pure parts: flags, place, environment, and what an ended rank means."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.errors import UsageError
from slurm_resilience.launcher import (
    control_socket,
    exit_codes,
    flags,
    launch,
    rendezvous_directory,
    request,
)
from slurm_resilience.launcher.control_socket import ControlSocket
from slurm_resilience.launcher.flags import STDOUT
from slurm_resilience.launcher.main import cli, main
from slurm_resilience.launcher.node_rank import NodeRank, find_node_rank
from slurm_resilience.launcher.processes.child_environment import (
    NodeSeats,
    common,
    nodes_told,
    of_rank,
    without_outer_rank,
)
from slurm_resilience.launcher.processes.output import Sink
from slurm_resilience.launcher.rendezvous_directory import (
    RendezvousDirectory,
    choose,
    is_complete,
    next_incarnation,
)
from slurm_resilience.launcher.restart_policy import ProcessEnd, RestartRules, judge
from slurm_resilience.mesh.model import Peer
from slurm_resilience.mesh.rendezvous import LAUNCHERS, RESTARTS, SharedDirectory, note_passed

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_NNODES": "4",
    "SLURM_STEP_NODELIST": "n[1-2],m7,k1",
}
SECRET = "ab" * 32


def here(nodes: str = "1", rank: int = 0, run: str = "r") -> NodeRank:
    return NodeRank(rank, flags.nnodes(nodes), run)


class TestWords:
    @pytest.mark.parametrize(("text", "least", "most"), [("4", 4, 4), ("2:4", 2, 4), ("1:1", 1, 1)])
    def test_nnodes(self, text: str, least: int, most: int) -> None:
        assert flags.nnodes(text) == flags.SeatSpan(least, most)

    @pytest.mark.parametrize("text", ["", "0", "4:2", "a", "1:2:3", "-1", "0:2"])
    def test_bad_nnodes(self, text: str) -> None:
        with pytest.raises(UsageError, match="--nnodes"):
            flags.nnodes(text)

    def test_ranks_of_a_node(self) -> None:
        assert flags.local_world("3", gpus=0, cpus=8) == 3
        assert flags.local_world("gpu", gpus=4, cpus=8) == 4
        assert flags.local_world("auto", gpus=4, cpus=8) == 4
        assert flags.local_world("auto", gpus=0, cpus=8) == 8
        assert flags.local_world("cpu", gpus=4, cpus=8) == 8
        for wrong in ("gpu", "0", "-1", "many", ""):
            with pytest.raises(UsageError, match="--nproc-per-node"):
                flags.local_world(wrong, gpus=0, cpus=8)

    def test_gpus_by_the_environment(self) -> None:
        offered = flags.gpus_offered
        assert offered({"CUDA_VISIBLE_DEVICES": "0,GPU-1f", "SLURM_GPUS_ON_NODE": "8"}) == 2
        assert offered({"CUDA_VISIBLE_DEVICES": ""}) == 0
        assert offered({"CUDA_VISIBLE_DEVICES": "0,-1,1"}) == 1
        assert offered({"SLURM_GPUS_ON_NODE": "8"}) == 8
        assert offered({}) == -1

    def test_streams(self) -> None:
        assert flags.streams("--tee", "3", 2) == flags.streams("--tee", "=3", 2) == (3, 3)
        assert flags.streams("--tee", "0:1,2:3", 3) == (1, 0, 3)
        for wrong in ("4", "0:4", "2:1", "x", "0:1,", ""):
            with pytest.raises(UsageError, match="--tee"):
                flags.streams("--tee", wrong, 2)
        assert flags.ranks_filter("1", 2) == {1}
        assert flags.ranks_filter(None, 2) == {0, 1}
        with pytest.raises(UsageError):
            flags.ranks_filter("a", 2)

    def test_addresses(self) -> None:
        found = flags.addresses("n1, n2:29500,[fd00::3]:7")
        assert [node.seat(1) for node in found] == ["n1:29401", "n2:29501", "[fd00::3]:8"]
        for wrong in ("n1:0", "n1:70000", "a/b", "n1:x", "[::1"):
            with pytest.raises(UsageError, match="HOST"):
                flags.addresses(wrong)

    @given(st.text(max_size=30))
    def test_any_text_is_an_answer_or_one_line(self, text: str) -> None:
        for parse in (flags.nnodes, flags.addresses, lambda t: flags.streams("--tee", t, 3)):
            try:
                parse(text)
            except UsageError as error:
                assert text.removeprefix("=") in str(error)

    def test_secret(self) -> None:
        assert flags.secret(SECRET.upper() + "\n", "f") == SECRET
        for wrong in ("", "ab", "x" * 64, SECRET + "a"):
            with pytest.raises(UsageError, match="openssl"):
                flags.secret(wrong, "f")


class TestPlace:
    def test_alone(self) -> None:
        assert find_node_rank({}) == NodeRank(0, flags.SeatSpan(1, 1), "none")

    def test_in_a_step(self) -> None:
        assert find_node_rank(STEP) == NodeRank(3, flags.SeatSpan(4, 4), "7.0.2")
        assert find_node_rank(STEP, nodes="2:5").nodes == flags.SeatSpan(2, 5)

    def test_our_supervisor_knows_better(self) -> None:
        told = STEP | {"NODE_RANK": "1", "NNODES": "2", "SRES_TOKEN": "7.0.3"}
        assert find_node_rank(told) == NodeRank(1, flags.SeatSpan(2, 2), "7.0.3")

    def test_flags_know_best(self) -> None:
        assert find_node_rank(STEP, "8", 5, "mine") == NodeRank(5, flags.SeatSpan(8, 8), "mine")
        assert find_node_rank(STEP, standalone=True).alone

    def test_a_batch_script_is_no_step(self) -> None:
        batch = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "4", "SLURM_NODEID": "0", "SLURM_PROCID": "0"}
        found = find_node_rank(batch)
        assert found.alone
        assert "srun --ntasks-per-node=1" in found.note

    @pytest.mark.parametrize(
        ("environment", "nodes", "rank", "word"),
        [
            ({}, "2", None, "--node-rank"),
            ({}, "2", 2, "does not exist"),
            ({}, "2", -1, "does not exist"),
            (STEP, "2", None, "does not exist"),
            (STEP | {"SLURM_LOCALID": "1"}, None, None, "--ntasks-per-node=1"),
        ],
    )
    def test_impossible(
        self, environment: dict[str, str], nodes: str | None, rank: int | None, word: str
    ) -> None:
        with pytest.raises(UsageError, match=word):
            find_node_rank(environment, nodes, rank)

    def test_standalone_is_one_node(self) -> None:
        with pytest.raises(UsageError, match="--standalone"):
            find_node_rank({}, "2", standalone=True)


class TestMeeting:
    def test_alone_is_private(self, tmp_path: Path) -> None:
        first, second = (choose({}, here(), 2, tmp_path) for _ in range(2))
        assert first.meet == f"dir:{tmp_path}/mesh"
        assert len(first.secret) == 64
        assert first.secret != second.secret
        assert first.directory is None

    def test_a_complete_training_is_not_taken_for_this_one(self, tmp_path: Path) -> None:
        ended = tmp_path / "run/job/mesh/outcome"
        ended.parent.mkdir(parents=True)
        for code in (76, 0):
            ended.write_text(f'{{"code": {code}, "step": 7}}')
            given = ({}, here("2", 1, "job"), 2, tmp_path, "dir", str(tmp_path))
            if code:
                choose(*given)
                continue
            with pytest.raises(UsageError, match=r"complete \(step 7\): .* --rdzv-id"):
                choose(*given)
            choose({"SLURM_JOB_ID": "3"}, *given[1:])

    @pytest.mark.parametrize("place", [LAUNCHERS, RESTARTS])
    def test_a_plain_program_that_is_complete_is_not_met_again(
        self, tmp_path: Path, place: str
    ) -> None:
        """Its launchers took themselves for late ones: none trained, and all ended with 0."""
        SharedDirectory(tmp_path / "run" / "job" / place).outcome(0, -1, "")
        with pytest.raises(UsageError, match=r"is complete: give this one a new --rdzv-id"):
            choose({}, here("2", 1, "job"), 2, tmp_path, "dir", str(tmp_path))

    def test_a_step_does_several_trainings_one_after_the_other(self, tmp_path: Path) -> None:
        """The second one must not take itself for a late part of the first, which is complete."""
        step = {"SLURM_JOB_ID": "3", "SLURM_STEP_ID": "0", "SLURMD_NODENAME": "n1"}

        def meet(**more: str) -> RendezvousDirectory:
            return choose(step | more, here("2", 1, "job"), 2, tmp_path, "dir", str(tmp_path))

        first, again = meet(), meet()
        assert first.meet == again.meet == f"dir:{tmp_path}/run/job/mesh", "a launcher that failed"
        note_passed(first.passed)
        assert meet().meet == f"dir:{tmp_path}/run/job.1/mesh"
        note_passed(meet().passed)
        assert meet().meet == f"dir:{tmp_path}/run/job.2/mesh"
        assert meet(SLURMD_NODENAME="n2").meet == first.meet, "it is not as far yet"
        assert meet(SLURM_STEP_ID="1").meet == first.meet, "a step that joins begins anew"

    def test_shared_directory_by_run(self, tmp_path: Path) -> None:
        found = choose({}, here("2", 1, "job/1"), 2, tmp_path, "dir", str(tmp_path / "s"))
        assert found.meet == f"dir:{tmp_path}/s/run/job_1/mesh"
        assert (tmp_path / "s/run/job_1").stat().st_mode & 0o777 == 0o700
        by_variable = choose({"SRES_DIR": str(tmp_path / "s")}, here("2", 1, "job/1"), 2, tmp_path)
        assert by_variable.meet == found.meet

    def test_jobs_of_one_script_do_not_meet(self, tmp_path: Path) -> None:
        """A --rdzv-id that a script had for torchrun is the same in all jobs of a sweep."""
        where = {"SRES_DIR": str(tmp_path)}
        places = set()
        for own in ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8"}, {"SRES_TOKEN": "9.0.1"}):
            found = choose(STEP | where | own, here("2", 1, "100"), 1, tmp_path)
            other_node = STEP | where | own | {"SLURM_PROCID": "0", "SLURM_STEP_ID": "5"}
            assert choose(other_node, here("2", 0, "100"), 1, tmp_path).meet == found.meet
            places.add(found.meet)
        assert len(places) == 3
        wanted = choose(STEP, here("2", 1, "100"), 1, tmp_path, "dir", str(tmp_path / "s"))
        assert wanted.meet == f"dir:{tmp_path}/s/run/100/mesh", "a place that a person names"

    def test_a_running_training_is_not_taken_for_this_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each took the other's seats again, until neither had a process left to start."""
        monkeypatch.setattr(rendezvous_directory, "_ENDING_SECONDS", 0.0)
        place = SharedDirectory(tmp_path / "run/job/mesh")
        given: Any = (here("2", 1, "job"), 2, tmp_path, "dir", str(tmp_path))
        with socket.create_server(("127.0.0.1", 0)) as ear:
            port = ear.getsockname()[1]
            place.enter(Peer("a", 3, node="n9", host="127.0.0.1", port=port, pid=12))
            with pytest.raises(UsageError, match=r"process 12 of n9 is its rank 3\. .* --rdzv-id"):
                choose({}, *given)
            choose({}, here("2", 0, "job"), *given[1:])
            choose({"SRES_TOKEN": "7.0.1"}, *given)
        choose({}, *given)

    @pytest.mark.parametrize("name", [LAUNCHERS, RESTARTS])
    def test_a_running_plain_program_is_not_ended_by_a_second_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """The second one's launchers took the node ranks, and the first one's ended."""
        monkeypatch.setattr(rendezvous_directory, "_ENDING_SECONDS", 0.0)
        place = SharedDirectory(tmp_path / "run/job" / name)
        given: Any = (here("2", 1, "job"), 2, tmp_path, "dir", str(tmp_path))
        with socket.create_server(("127.0.0.1", 0)) as ear:
            port = ear.getsockname()[1]
            place.enter(Peer("a", 1, node="n9", host="127.0.0.1", port=port, pid=12))
            with pytest.raises(UsageError, match=r"n9 is the launcher of its node rank 1\. .*-id"):
                choose({}, *given)
            choose({}, here("2", 0, "job"), *given[1:])
            choose({"SRES_TOKEN": "7.0.1"}, *given)
        choose({}, *given)

    def test_peers_have_a_port_for_each_seat(self, tmp_path: Path) -> None:
        given = {"SRES_SECRET": SECRET}
        found = choose(given, here("2"), 2, tmp_path, "peers", "n1:100,n2")
        assert found.meet == "peers:n1:100,n1:101,n2:29400,n2:29401"
        assert (found.secret, found.first) == (SECRET, "n1")

    def test_peers_by_slurm_in_slurms_order(self, tmp_path: Path) -> None:
        found = choose(STEP | {"SRES_SECRET": SECRET}, find_node_rank(STEP), 1, tmp_path, "peers")
        assert found.meet == "peers:n1:29400,n2:29400,m7:29400,k1:29400"

    @pytest.mark.parametrize(
        ("backend", "endpoint", "secret", "word"),
        [
            ("peers", "n1,n2", "", "--secret-file"),
            ("peers", "n1", SECRET, "2"),
            ("peers", None, SECRET, "--rdzv-endpoint"),
            (None, None, "", "--rdzv-backend=dir"),
            ("c10d", "n1:29400", "", "--rdzv-backend=dir"),
            (None, "shared", "", "write ./shared"),
        ],
    )
    def test_not_enough_to_go_by(
        self, tmp_path: Path, backend: str, endpoint: str, secret: str, word: str
    ) -> None:
        given = {"SRES_SECRET": secret} if secret else {}
        with pytest.raises(UsageError, match=word):
            choose(given, here("2"), 2, tmp_path, backend, endpoint)

    def test_torchruns_backends_are_mapped(self, tmp_path: Path) -> None:
        found = choose({}, here(), 2, tmp_path, "c10d", "localhost:0")
        assert found.meet.startswith("dir:")
        assert "c10d" in found.note

    def test_secret_file(self, tmp_path: Path) -> None:
        file = tmp_path / "secret"
        file.write_text(SECRET + "\n")
        file.chmod(0o640)
        with pytest.raises(UsageError, match="chmod 600"):
            choose({}, here("2"), 1, tmp_path, "peers", "a,b", str(file))
        file.chmod(0o600)
        found = choose({}, here("2"), 1, tmp_path, "peers", "a,b", str(file))
        assert found.secret == SECRET
        with pytest.raises(UsageError, match="No such file"):
            choose({}, here("2"), 1, tmp_path, "peers", "a,b", str(tmp_path / "none"))

    def test_a_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        (tmp_path / "seats").mkdir()
        os.mkfifo(tmp_path / "seats" / "0")
        os.mkfifo(tmp_path / "outcome")
        shared = RendezvousDirectory("dir:x", directory=tmp_path)
        assert next_incarnation(shared, 0, -1) == 0
        assert next_incarnation(shared, 0, -1) == 1, "a file has taken its place"
        assert not is_complete(f"dir:{tmp_path}")

    def test_a_directory_that_is_gone_is_told_in_a_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gone = tmp_path / "gone"
        gone.mkdir()
        monkeypatch.chdir(gone)
        gone.rmdir()
        with pytest.raises(UsageError, match="shared/run/r: No such file"):
            choose({}, here("2"), 1, tmp_path, "dir", "./shared")

    def test_a_directory_that_hangs_is_not_waited_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A launcher that waits for it passes no signal on, and sees no rank end."""
        shared = RendezvousDirectory("dir:x", directory=tmp_path)
        assert next_incarnation(shared, 0, -1) == 0
        answers, read = threading.Event(), rendezvous_directory.read_plain

        def hang(path: Path) -> bytes:
            assert answers.wait(60)
            return read(path)

        monkeypatch.setattr(rendezvous_directory, "read_plain", hang)
        monkeypatch.setattr(rendezvous_directory, "_HANG_SECONDS", 0.05)
        assert [next_incarnation(shared, 0, last) for last in (0, 1)] == [1, 2]
        assert not is_complete(f"dir:{tmp_path}")
        answers.set()
        monkeypatch.setattr(rendezvous_directory, "_HANG_SECONDS", 60.0)
        # Those that come late may count further; none goes back.
        assert next_incarnation(shared, 0, 2) >= 3
        assert int((tmp_path / "seats" / "0").read_text()) >= 3

    def test_incarnations_outlive_the_launcher(self, tmp_path: Path) -> None:
        shared = RendezvousDirectory("dir:x", directory=tmp_path)
        assert [next_incarnation(shared, 3, last) for last in (-1, 0, -1, -1)] == [0, 1, 2, 3]
        assert next_incarnation(shared, 4, -1) == 0
        assert next_incarnation(RendezvousDirectory("peers:x"), 3, 0) == 1


class TestEnvironment:
    NODE = NodeSeats(here("2:3", 1), 4, "dir:/m", "n2", SECRET, "/k", master=("n1", 29500))

    def test_a_rank(self) -> None:
        found = of_rank({}, self.NODE, 2, 5)
        wanted = {
            "SRES_SEAT": "6",
            "SRES_SEATS": "12",
            "SRES_INCARNATION": "5",
            "SRES_MEET": "dir:/m",
            "SRES_SECRET": SECRET,
            "SRES_KEEPER": "/k",
            "SRES_NODE": "n2",
            "SRES_MIN_WORLD": "8",
            "RANK": "6",
            "LOCAL_RANK": "2",
            "WORLD_SIZE": "12",
            "LOCAL_WORLD_SIZE": "4",
            "GROUP_RANK": "1",
            "MASTER_ADDR": "n1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "r",
            "TORCHELASTIC_RESTART_COUNT": "5",
            "OMP_NUM_THREADS": "1",
        }
        assert wanted.items() <= found.items()

    def test_a_launcher_that_a_rank_starts_makes_a_training_of_its_own(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rank = of_rank({}, self.NODE, 2, 5)
        user = {"SRES_MEET": "dir:/mine", "SRES_MESH": "speakers", "RANK": "1"}
        assert without_outer_rank(user) == user
        found: list[Mapping[str, str]] = []

        def stop(environment: Mapping[str, str], *_: object) -> NodeRank:
            found.append(environment)
            raise UsageError("seen")

        monkeypatch.setattr(request, "find_node_rank", stop)
        for name, value in (rank | {"HOME": "/home/alice"}).items():
            monkeypatch.setenv(name, value)
        assert main([__file__]) == UsageError.exit_code
        assert not {name for name in rank if name.startswith("SRES_")} & set(found[0])
        assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(found[0]) and "HOME" in found[0]

    def test_the_users_threads_stay(self) -> None:
        assert "OMP_NUM_THREADS" not in common({"OMP_NUM_THREADS": "6"}, self.NODE)

    def test_virtual_local_rank(self) -> None:
        node = NodeSeats(here(), 2, "dir:/m", "n", virtual=True)
        found = of_rank({"CUDA_VISIBLE_DEVICES": "4,6"}, node, 1, 0)
        assert (found["LOCAL_RANK"], found["CUDA_VISIBLE_DEVICES"]) == ("0", "6")

    @given(st.integers(1, 9), st.integers(1, 9), st.data())
    def test_every_seat_has_one_place(self, nodes: int, ranks: int, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, nodes - 1))
        seats = [
            of_rank({}, NodeSeats(here(str(nodes), node), ranks, "m", "n"), local, 0)["RANK"]
            for node in range(nodes)
            for local in range(ranks)
        ]
        assert seats == [str(seat) for seat in range(nodes * ranks)]
        assert seats[rank * ranks] == str(rank * ranks)


def end(code: int, at: float = 0.0, lived: float = 1.0, **more: Any) -> ProcessEnd:
    return ProcessEnd(code, at, lived, **more)


def test_what_killed_launchers_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = tmp_path / "sres-run-lives"
    for name in ("sres-run-lives", "sres-run-left", "other-program"):
        (tmp_path / name / "inside").mkdir(parents=True)
    handle = os.open(lives, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    rendezvous_directory._clean(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3, "they may have been made just now"
    monkeypatch.setattr(rendezvous_directory, "_FRESH_SECONDS", -1.0)
    rendezvous_directory._clean(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"sres-run-lives", "other-program"}
    os.close(handle)
    rendezvous_directory._clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["other-program"]


def test_private_files_lie_where_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full /dev/shm takes a directory, but nothing in it."""
    full: list[Path] = []
    write = Path.write_bytes

    def refuse(path: Path, data: bytes) -> int:
        if path.is_relative_to("/dev/shm"):
            full.append(path)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", refuse)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(rendezvous_directory, "_LONGEST", 1000)
    made = rendezvous_directory.private_directory()
    assert made.parent == tmp_path
    assert full and not full[0].parent.exists()


class TestVerdict:
    RULES = RestartRules(replacements=2, window=100.0, short_life=10.0)

    def test_done(self) -> None:
        assert judge([end(137), end(0)], self.RULES).do == "done"

    def test_a_signal_is_replaced(self) -> None:
        found = judge([end(137)], self.RULES)
        assert (found.do, found.reason) == ("replace", "SIGKILL")

    def test_the_budget(self) -> None:
        ends = [end(137, at) for at in (1.0, 2.0, 3.0)]
        assert judge(ends[:2], self.RULES).do == "replace"
        spent = judge(ends, self.RULES)
        assert (spent.do, spent.code) == ("end", 137)
        assert "--max-restarts" in spent.reason

    def test_the_budget_grows_back(self) -> None:
        assert judge([end(137, at) for at in (1.0, 2.0, 102.0)], self.RULES).do == "replace"
        forever = RestartRules(replacements=2, window=0.0)
        assert judge([end(137, at) for at in (1.0, 2.0, 10_002.0)], forever).do == "end"

    def test_codes_that_say_it(self) -> None:
        assert judge([end(exit_codes.STOP)], self.RULES).code == exit_codes.STOP
        poisoned = [end(exit_codes.POISONED, place="a:1")] * 2
        assert judge(poisoned, self.RULES).do == "replace"

    def test_a_seat_that_another_launcher_has_is_left_to_it(self) -> None:
        found = judge([end(137, evicted="a newer process took seat 3")], self.RULES)
        assert (found.do, found.code) == ("failed", 137)
        assert "--rdzv-id" in found.reason

    def test_who_ends_well_in_the_middle_is_replaced(self) -> None:
        assert judge([end(0)], self.RULES).do == "done"
        found = judge([end(0, trained=True)], self.RULES)
        assert found.do == "replace"
        assert "in the middle of the training" in found.reason
        spent = judge([end(0, trained=True)] * 3, self.RULES)
        assert (spent.do, spent.code) == ("end", 1)

    def test_what_fails_after_the_training_is_complete_is_not_replaced(self) -> None:
        """A new process finds nothing to train, and would end as if all had gone well."""
        found = judge([end(3, complete=True)], self.RULES)
        assert (found.do, found.code) == ("failed", 3)
        assert found.reason == "exit code 3, after the training was complete"
        assert judge([end(0, complete=True)], self.RULES).do == "done"

    def test_the_same_bug_twice(self) -> None:
        bug = end(1, place="ValueError at a:1", error="ValueError: x")
        assert judge([bug], self.RULES).do == "replace"
        twice = judge([bug, bug], self.RULES)
        assert (twice.do, twice.code) == ("end", 1)
        assert "ValueError at a:1" in twice.reason
        assert "ValueError: x" in twice.reason
        long = end(1, lived=11.0, place="ValueError at a:1")
        for other in (long, end(3, place=bug.place), end(1, place="b:2"), end(1)):
            assert judge([other, bug], self.RULES).do == "replace"
            assert judge([bug, other], self.RULES).do == "replace"

    @pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV, signal.SIGKILL])
    def test_the_same_bug_whatever_ends_the_process_after_it(self, number: int) -> None:
        """Gloo's threads may abort an interpreter that ends, and one that hangs is killed."""
        bug = end(1, place="ValueError at a:1", error="ValueError: x")
        killed = end(128 + number, place=bug.place, error=bug.error)
        for ends in ([bug, killed], [killed, bug], [killed, end(134, place=bug.place)]):
            assert judge(ends, self.RULES).do == "end"
        assert judge([bug, end(128 + number)], self.RULES).do == "replace"

    def test_evicted_is_nobodys_bug(self) -> None:
        gone = end(137, evicted="it hangs")
        found = judge([gone, gone], self.RULES)
        assert found.do == "replace"
        assert "it hangs" in found.reason

    @given(
        st.lists(
            st.builds(
                ProcessEnd,
                st.integers(0, 255),
                st.floats(0, 1000),
                st.floats(0, 100),
                st.sampled_from(["", "a", "b"]),
            ),
            min_size=1,
            max_size=20,
        ),
        st.integers(0, 5),
    )
    def test_every_verdict_has_its_reason(self, ends: list[ProcessEnd], replacements: int) -> None:
        found = judge(ends, RestartRules(replacements))
        assert found.reason
        assert (found.do == "done") == (ends[-1].code == 0)
        assert found.do != "end" or found.code != 0


@pytest.mark.parametrize(
    ("told", "nodes"),
    [
        ({"SRES_TOKEN": "7.1", "SRES_SEATS": "16"}, 4),
        ({"SRES_TOKEN": "7.1", "SRES_SEATS": "4", "SRES_SEATS_HERE": "2"}, 4),  # launchers' seats
        ({"SRES_TOKEN": "7.1"}, 3),
        ({"SRES_SEATS": "16"}, 3),
    ],
)
def test_a_launcher_that_joins_has_the_size_of_the_training(
    told: dict[str, str], nodes: int
) -> None:
    """A script counts the nodes of the job as it is now, with one that was lost or exchanged: the
    others would not take its ranks in."""
    node = NodeSeats(here("3"), 4, "dir:/m", "n1", nodes_told=nodes_told(told, 4))
    assert node.all_nodes == nodes
    assert of_rank({}, node, 0, 1)["SRES_SEATS"] == str(4 * nodes)


def test_codes_in_words() -> None:
    assert exit_codes.of_status(-signal.SIGKILL) == 137
    assert exit_codes.of_status(3) == 3
    assert exit_codes.describe(137) == "SIGKILL"
    assert exit_codes.describe(137, exited=True) == "exit code 137 (as after SIGKILL)"
    assert exit_codes.describe(1) == "exit code 1"


def test_a_code_like_a_signal_s_hides_no_other_one() -> None:
    """Two exits with other codes at one place were taken for one bug, as after a signal."""
    ends = [ProcessEnd(1, 1.0, 1.0, "x:1"), ProcessEnd(137, 2.0, 1.0, "x:1", by="exit")]
    assert judge(ends, RestartRules()).do == "replace"
    killed = [ends[0], ProcessEnd(137, 2.0, 1.0, "x:1")]
    assert judge(killed, RestartRules()).do == "end"


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--nonsense", "t.py"], "--nonsense"),
        ([], "no script"),
        (["/no/such.py"], "no such file"),
        (["--nproc_per_node=x", __file__], "--nproc-per-node"),
        (["--nnodes=2", __file__], "--node-rank"),
        (["--max-restarts=-1", __file__], "restarts"),
        (["-m", "--no-python", "x"], "--no-python"),
        (["--no-python", "no-such-program"], "no such program"),
        (["--recipe", "/no/such.toml"], "no such file"),
        (["--recipe", __file__, __file__], "leave the script out"),
        (["--pre-train-script", "/no/such", __file__], "--pre-train-script"),
        (["--pre-train-args", "a", __file__], "--pre-train-args"),
        (["--post-train-script", __file__, "--post-train-args", "'", __file__], "post-train-args"),
        (["--standalone", "--nnodes=2", __file__], "--standalone"),
        (["-t", "9", __file__], "--tee"),
    ],
)
def test_wrong_words_are_one_line(
    argv: list[str], word: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NNODES", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    assert main(argv) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("sres-run: error: ")
    assert word in line


def test_too_few_open_files_are_one_line() -> None:
    """`ulimit -n 8` gave a traceback; with 16, one rank waited until another one had ended."""
    code = "import resource, sys; from slurm_resilience.launcher.main import main; "
    code += "resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2); "
    code += "sys.exit(main(['--nproc=2', '--no-python', 'true']))"
    for limit, expected in (("8", 2), ("16", 2), ("64", 0)):
        words = [sys.executable, "-c", code, limit]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == expected, done.stderr
        lines = done.stderr.splitlines()
        assert len(lines) == bool(expected), done.stderr
        assert not lines or f"Too many open files: the limit is {limit} (ulimit -n)" in lines[0]


def test_the_launcher_starts_without_torch() -> None:
    code = "import slurm_resilience.launcher.launch, slurm_resilience.launcher.main, sys; "
    code += "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


class TestControlSocket:
    @pytest.fixture
    def ear(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlSocket]:
        # Not tmp_path: the name of a socket is short.
        place = Path(tempfile.mkdtemp())
        monkeypatch.setenv(control_socket.VARIABLE, str(place / "s"))
        ear = ControlSocket(place / "s")
        yield ear
        ear.close()
        shutil.rmtree(place)

    def test_the_end_of_a_training_is_heard_by_a_launcher_that_is_held_up(
        self, ear: ControlSocket
    ) -> None:
        told = 0
        while control_socket.ready():
            told += 1
        assert told
        leaving = threading.Thread(target=control_socket.leaves)
        leaving.start()
        leaving.join(0.2)  # it finds the socket full
        heard, deadline = [], time.monotonic() + 20
        while not any(note.leaves for note in heard) and time.monotonic() < deadline:
            heard += ear.hear()
            leaving.join(0.01)
        leaving.join()
        assert [note.leaves for note in heard if note.leaves] == [os.getpid()]
        assert len(heard) == told + 1

    def test_a_launcher_that_is_gone_is_not_waited_for(self, ear: ControlSocket) -> None:
        ear.close()
        assert not control_socket.leaves()
        assert not control_socket.evict(1, "hangs")


def test_every_option_has_torchruns_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in cli.params:
        if not isinstance(option, click.Option) or option.is_flag or option.name == "help":
            continue
        value = {"IntRange": "1", "IntParamType": "1", "FloatRange": "1.5"}
        text = value.get(type(option.type).__name__, "auto")
        name = max(option.opts, key=len).removeprefix("--").replace("-", "_")
        with monkeypatch.context() as patch:
            patch.setenv(f"PET_{name.upper()}", text)
            read = cli.make_context("sres-run", ["train.py"]).params[option.name or ""]
        assert read in (option.type(text), (text,)), name


def test_output_without_end_does_not_keep_the_launcher_from_all_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that writes faster than its output is shown: no signal came through any more."""
    reads = iter(range(1000))

    def more(*_: int) -> bytes:
        assert next(reads, None) is not None, "it reads without end"
        return b"more\n"

    reader, writer = os.pipe()
    try:
        sink = Sink(reader, STDOUT)
        monkeypatch.setattr("os.read", more)
        monkeypatch.setattr("os.write", lambda _, data: len(data))
        assert sink.pump()
    finally:
        monkeypatch.undo()
        os.close(reader)
        os.close(writer)


def test_output_without_a_stdout_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # `sres-run --tee=1 train.py >&-`
    reader, writer = os.pipe()
    os.write(writer, b"lost\n")
    sink = Sink(reader, STDOUT)
    assert sink.pump()
    os.close(writer)
    assert not sink.pump()
    os.close(reader)


def test_a_line_without_a_stderr_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under ``2>&-``: the first fault ended the launcher, and with it the training."""
    monkeypatch.setattr(sys, "stderr", None)
    launch.say("rank 1: SIGKILL")


REFUSING = """
import sys
from slurm_resilience.launcher import launch
from slurm_resilience.launcher.main import main
from slurm_resilience.launcher.processes.process import Process

launch._RETRY_SECONDS, launch._REFUSED_SECONDS = 0.01, float(sys.argv[2])
start, left = Process.start.__func__, int(sys.argv[1])


def refused(cls, *args, **more):
    global left
    left -= 1
    if left >= 0:
        raise OSError(11, "Resource temporarily unavailable")
    return start(cls, *args, **more)


Process.start = classmethod(refused)
sys.exit(main(["--standby", "0", "--max-restarts", "3", "--no-python", "true"]))
"""


@pytest.mark.parametrize(("seconds", "code"), [(60, 0), (0, 1)])
def test_a_refused_process_is_no_failure_of_the_program(seconds: int, code: int) -> None:
    """Ten seconds without used up all replacements, and ended the training."""
    words = [sys.executable, "-c", REFUSING, "20", str(seconds)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    if seconds:
        assert done.stderr.count("no new process") == 1, done.stderr
    else:  # one that lasts is told, and counts
        assert "all that --max-restarts allows" in done.stderr
