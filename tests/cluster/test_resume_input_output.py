"""Standard input and output files of a step that is started again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from beside import FLAG, Site, WaitFor, allocate

from slurm_resilience.lab import Lab, LabSpec

LIMIT_BYTES = 100_000
OPTIONS = {"resume": {"diagnosis_wait": 0.2, "max_relaunches": 1, "stdin_limit_bytes": LIMIT_BYTES}}
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
    assert "not resumed: it ended with exit code 137" in end.stderr
    assert (site.directory / "got").stat().st_size == 2 * LIMIT_BYTES
