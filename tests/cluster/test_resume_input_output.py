"""Standard input and output files of a step that is started again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from beside import FLAG, Site, WaitFor, allocate

from slurm_resilience.lab import Lab, LabSpec

LIMIT_BYTES = 100_000
OPTIONS = {
    "resume": {
        "diagnosis_wait": 0.2,
        "max_relaunches": 1,
        "stdin_limit_bytes": LIMIT_BYTES,
        "time_margin": 90.0,
    }
}
SAY = "echo attempt $SRES_ATTEMPT; until grep -q $SRES_ATTEMPT$ {}; do sleep 0.02; done"
"""Slurm may lose what a task that is killed has just written."""
FAILS_ONCE = "[ -e again ] || { touch again; kill -9 $$; }"


@pytest.fixture(scope="module")
def job(built_plugin: Path, shared_lab: Callable[[LabSpec], Lab]) -> Iterator[tuple[Lab, str]]:
    lab = shared_lab(LabSpec(nodes=3, plugin=built_plugin, daemons=False, sres_options=OPTIONS))
    job = allocate(lab, "-w", "n[1-2]", "--exclusive")
    yield lab, job
    lab.run(["scancel", job])


@pytest.fixture
def site(job: tuple[Lab, str], tmp_path: Path, wait_for: WaitFor) -> Iterator[Site]:
    site = Site(*job, tmp_path, wait_for)
    yield site
    site.expect_nothing_left()


@pytest.mark.parametrize(
    "line",
    [
        "$SRUN sh -s <<'EOF'\n{}\nEOF\n",
        "cat > in <<'EOF'\n{}\nEOF\n$SRUN sh -s < in",
        "{{ sleep 0.3; cat <<'EOF'\n{}\nEOF\n}} | $SRUN sh -s",
    ],
    ids=["here", "file", "pipe"],
)
def test_the_second_attempt_reads_the_same_input(site: Site, line: str) -> None:
    program = f"{FAILS_ONCE}; echo trained on attempt $SRES_ATTEMPT"
    end = site.run("bash", "-c", line.format(program), SRUN=f"srun {FLAG} -n1")
    assert (end.code, end.stdout) == (0, "trained on attempt 2\n"), end


def test_input_past_the_limit_is_not_given_again(site: Site) -> None:
    program = f"cat > got; {FAILS_ONCE}"
    script = f"head -c {2 * LIMIT_BYTES} /dev/zero | $SRUN sh -c '{program}'; echo $?"
    end = site.run("bash", "-c", script, SRUN=f"srun {FLAG} -n1")
    assert end.stdout == "137\n", end
    assert end.stderr.count("cannot be started again any more") == 1
    assert "not resumed: " in end.stderr and "not there for another attempt" in end.stderr
    assert (site.directory / "got").stat().st_size == 2 * LIMIT_BYTES


@pytest.mark.parametrize("mode", [[], ["--open-mode=truncate"]], ids=["default", "truncate"])
def test_output_of_the_first_attempt_is_kept(site: Site, mode: list[str]) -> None:
    program = f"{SAY.format('out.txt')}; {FAILS_ONCE}"
    end = site.run("srun", FLAG, "-n1", "-o", "out.txt", *mode, "sh", "-c", program)
    assert end.code == 0, end
    lines = (site.directory / "out.txt").read_text().splitlines()
    if mode:
        assert lines == ["attempt 2"]
    else:
        assert lines[0] == "attempt 1" and lines[-1] == "attempt 2"
        # On any node of the job: the step before may still be ending on its first one.
        assert [line for line in lines if line.startswith("sres: attempt 2 starts on n")], lines


def test_each_task_s_own_output_is_kept_too(site: Site) -> None:
    program = f"{SAY.format('out.0')}; {FAILS_ONCE}"
    assert site.run("srun", FLAG, "-n1", "-o", "out.%t", "sh", "-c", program).code == 0
    assert (site.directory / "out.0").read_text() == "attempt 1\nattempt 2\n"


def test_an_attempt_whose_output_has_nowhere_to_go_has_not_ended_well(site: Site) -> None:
    """Slurm starts none of its tasks then, and srun ends with 0."""
    (site.directory / "out").mkdir()
    # Not gone only: a newer Slurm makes the folder.
    program = "echo run >>runs; rm -r out; touch out; kill -9 $$"
    end = site.run("srun", FLAG, "-n1", "-o", "out/%t", "sh", "-c", program)
    assert (site.directory / "runs").read_text() == "run\n", end
    assert end.code == 1 and "not resumed: " in end.stderr, end


def test_a_program_that_ends_shortly_before_the_time_limit_is_not_started_again(
    site: Site,
) -> None:
    """The job has a minute: as after --signal, when the program has written its checkpoint."""
    job = allocate(site.lab, "-w", "n3", "--exclusive", "--time=1")
    end = site.run("srun", FLAG, "-n1", "sh", "-c", "echo run >>runs; kill -9 $$", SLURM_JOB_ID=job)
    assert end.code == 137, end
    assert (site.directory / "runs").read_text() == "run\n"
    assert "time limit is" in end.stderr
    site.lab.run(["scancel", job])


def test_a_directory_that_one_node_does_not_see_is_told_at_the_start(site: Site) -> None:
    folder = str(site.directory)
    site.lab.run(["mount", "-t", "tmpfs", "none", folder], node="n2", check=True)
    try:
        end = site.run("srun", FLAG, "-N2", "-n4", "true")
    finally:
        site.lab.run(["umount", folder], node="n2", check=True)
    assert end.code == 0
    told = [line for line in end.stderr.splitlines() if "does not see" in line]
    assert len(told) == 1 and "n2" in told[0] and f"{folder}/.sres" in told[0], end


def test_in_a_directory_that_cannot_be_written_the_step_runs_without_a_fence(site: Site) -> None:
    script = "mount -t tmpfs -o ro none . && cd $PWD && exec $SRUN sh -c 'echo [$SRES_DIR]'"
    words = ["unshare", "-m", "bash", "-c", script]
    end = site.run(*words, SRUN=f"srun {FLAG} -n1 --chdir=/")
    assert (end.code, end.stdout) == (0, "[]\n"), end
    assert end.stderr.count("no directory for a fence can be made") == 1
    assert "Read-only file system" in end.stderr
