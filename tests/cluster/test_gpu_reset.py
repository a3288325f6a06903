"""A GPU is reset on an empty node by its sresd; where that does not help, the node is rebooted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import Job, NodesOf, all_idle, events, kinds

from slurm_resilience.lab import Lab, LabSpec

WaitFor = Callable[..., Any]
XID = "NVRM: Xid (PCI:0000:3b:00): 46, pid='<unknown>', name=<unknown>, GPU stopped processing"
SMI = """\
#!/bin/sh
# As nvidia-smi 550 prints it, on a node with one GPU.
case "$1" in
--query-gpu=*) echo 00000000:3B:00.0 ;;
--gpu-reset) echo "$@" >> {folder}/resets
    [ ! -e {folder}/fails ] || {{ echo "Unable to reset this GPU because it's hung."; exit 3; }}
    printf 'GPU %s was successfully reset.\\nAll done.\\n' "$3" ;;
esac
"""


def test_a_gpu_is_reset_and_where_that_fails_its_node_rebooted(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: WaitFor, tmp_path: Path
) -> None:
    smi, resets = tmp_path / "nvidia-smi", tmp_path / "resets"
    smi.write_text(SMI.format(folder=tmp_path))
    smi.chmod(0o755)
    options = {"agent": {"nvidia_smi": str(smi)}, "recovery": {"max_resets": 2}}
    lab = fresh_lab(LabSpec(nodes=2, network=True, sres_options=options))
    wait_for(lambda: all_idle(lab), 30, NodesOf(lab))
    boots = lab.status()["nodes"]["n2"]["boots"]

    job = Job(lab, tmp_path, "--nodelist=n2", srun="srun", nodes=1)
    wait_for(lambda: job.running_on(1, 1), 30, job)
    lab.kmsg("n2", XID)
    wait_for(lambda: "marked" in kinds(lab, "n2"), 30, NodesOf(lab))
    shown = lab.run(["scontrol", "show", "node", "n2", "-o"]).stdout
    assert "Reason=Action:Reset" in shown and "pending-reset" in shown
    assert not resets.exists()  # its job may end
    job.let_end()
    wait_for(lambda: "closed" in kinds(lab, "n2"), 60, NodesOf(lab))
    assert resets.read_text().splitlines() == ["--gpu-reset -i 00000000:3B:00.0"]
    assert "srun ended with 0" in job.ended()
    assert lab.status()["nodes"]["n2"]["boots"] == boots

    (tmp_path / "fails").touch()
    lab.kmsg("n2", XID)
    wait_for(lambda: kinds(lab, "n2").count("closed") == 2, 90, NodesOf(lab))
    done = [e["text"] for e in events(lab) if e["kind"] == "replacing"]
    assert [text.split()[-2:] for text in done] == [
        ["reset", "n2"],
        ["reset", "n2"],
        ["reboot", "n2"],
    ]
    (failed,) = [e["text"] for e in events(lab) if e["kind"] == "replacement-failed"]
    assert "Unable to reset this GPU" in failed and failed.endswith("it is rebooted")
    assert lab.status()["nodes"]["n2"]["boots"] == boots + 1
    wait_for(lambda: all_idle(lab), 30, NodesOf(lab))
