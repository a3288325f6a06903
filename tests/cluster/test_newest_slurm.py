"""The main job's four faults on the newest Slurm release that the project is tested with.

The same tests as in `test_main_job`, which runs on the machine's own Slurm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_main_job as main_job

from slurm_resilience.errors import MissingTool
from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.lab.releases import VERSIONS, root_of

WaitFor = Callable[..., Any]
NEWEST = VERSIONS[-1]


@pytest.fixture
def newest_lab(fresh_lab: Callable[[LabSpec], Lab]) -> Callable[[LabSpec], Lab]:
    try:
        root = root_of(NEWEST)
    except MissingTool as error:
        pytest.skip(f"needs a lab: {error}")
    return lambda spec: fresh_lab(dataclasses.replace(spec, slurm_root=root))


@pytest.mark.parametrize("fault", ["power", "xid", "admin"])
def test_node_fault(
    newest_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path, fault: str
) -> None:
    main_job.test_node_fault(newest_lab, wait_for, tmp_path, fault, gres=None, no_kill=False)


def test_a_killed_rank(
    newest_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    main_job.test_a_killed_rank_is_relaunched_on_the_same_nodes(newest_lab, wait_for, tmp_path)
