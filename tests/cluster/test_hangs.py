"""Tasks of a plain program report their steps, and one of them stops: its node is named, the step
is ended, and the next attempt ends well."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, all_idle

from slurm_resilience.lab import Lab, LabSpec

WaitFor = Callable[..., Any]
SRES = str(Path(sys.prefix) / "bin" / "sres")

STEPS = """\
#!/bin/bash
# Steps together with the others: none goes on before all have written the step.
read -r host port token <<<"$SRES_PROGRESS"
mkdir -p "at-$SRES_ATTEMPT"
for step in $(seq 1 20); do
    if [ "$SRES_ATTEMPT.$SLURM_PROCID.$step" = "1.1.12" ]; then sleep 1000; fi
    echo "$token $SLURM_PROCID $step" >"/dev/udp/$host/$port"
    touch "at-$SRES_ATTEMPT/$step.$SLURM_PROCID"
    until [ "$(ls "at-$SRES_ATTEMPT" | grep -c "^$step\\.")" = "$SLURM_NTASKS" ]; do
        sleep 0.05
    done
done
echo "rank $SLURM_PROCID is done"
"""


@pytest.fixture
def lab(shared_lab: Callable[[LabSpec], Lab]) -> Lab:
    quick = {"hang": {"floor": 2.0, "steps": 5, "gather": 10.0}, "resume": {"check_wait": 0.0}}
    return shared_lab(LabSpec(nodes=3, network=True, sres_options=quick))


def steps(tmp_path: Path) -> str:
    program = tmp_path / "steps.sh"
    program.write_text(STEPS)
    program.chmod(0o755)
    return str(program)


def test_a_hang_is_found_its_node_named_and_the_program_started_again(
    lab: Lab, wait_for: WaitFor, tmp_path: Path
) -> None:
    job = Job(lab, tmp_path, srun=f"srun --auto-resume=1 {steps(tmp_path)}", nodes=3)
    wait_for(lambda: "srun ended with 0" in job.ended(), 60, job)
    log = job.log()
    assert re.search(r"hang: no step for \d+ s after step 12", log), log
    assert re.search(r"culprit       rank 1 reported step 11, the others 12 \(n2\)", log), log
    assert re.search(r"what failed   it hung: no step for .* \(n2\)", log), log
    assert log.count(" is done\n") == 3 and "recovered: attempt 2" in log, log
    assert "time lost     at most" in log and "transient" in log, log
    (kept,) = re.findall(r"sres explain (\S+)", log)
    told = lab.run([SRES, "explain", kept], check=True).stdout
    assert "rank 1" in told and "n2" in told, told
    wait_for(lambda: all_idle(lab), 30, "all nodes are idle again")


def test_a_person_may_only_be_told(lab: Lab, wait_for: WaitFor, tmp_path: Path) -> None:
    """And a program that writes a line for each step need not report any."""
    log_steps = tmp_path / "log_steps.sh"
    log_steps.write_text(
        '#!/bin/bash\nfor step in $(seq 1 12); do echo "step $step"; sleep 0.8; done\n'
        'until [ -e "$OLDPWD/go" ] || [ -e go ]; do sleep 0.1; done\necho "step 13"\nsleep 3\n'
    )
    log_steps.chmod(0o755)
    options = "--auto-resume-hangs=tell --auto-resume-progress='log:^step ([0-9]+)'"
    job = Job(lab, tmp_path, srun=f"srun --auto-resume=1 {options} -n1 -N1 {log_steps}", nodes=1)
    wait_for(lambda: "nothing (--auto-resume-hangs=tell): the step runs on" in job.log(), 60, job)
    (job.folder / "go").touch()
    wait_for(lambda: "the program goes on: step 13" in job.log(), 30, job)
    wait_for(lambda: "srun ended with 0" in job.ended(), 30, job)
    assert "recovered" not in job.log()
    wait_for(lambda: all_idle(lab), 30, "all nodes are idle again")
