"""Write docs/health-coverage.md: the table of checks and kernel lines, from the code."""

from __future__ import annotations

from pathlib import Path

from slurm_resilience.health.coverage import CoverageRow, coverage_rows

PAGE = Path(__file__).resolve().parent.parent / "docs" / "health-coverage.md"
HEAD = """\
# Health coverage

Written by `scripts/health-coverage` from the code; do not edit. `sres check list` prints the
same rows. [health-checks.md](health-checks.md) explains the verdicts.

| check or line | source | threshold | verdict | pace | reason | test |
|---|---|---|---|---|---|---|
"""
STAND_INS = (
    (
        "NVIDIA GPUs",
        "`tests/support/nvml_stub.c`, a libnvidia-ml.so that the real pynvml loads, its event set "
        "included; recorded output of nvidia-smi",
    ),
    ("DCGM", "an executable `dcgmi` with recorded output of DCGM 3 and 4"),
    ("kernel log: Xid, SXid, EFA, Neuron", "recorded lines, in the log that sresd reads"),
    ("EFA, InfiniBand, EDAC, PCIe, NVMe, Neuron: files", "a directory laid out as sysfs is"),
    ("`neuron-ls`, `nccom-test`, fi_pingpong", "executables with recorded output"),
    (
        "Neuron cores: `neuron_training`, collectives over nodes (`--level cluster`)",
        "processors play the cores, behind modules named torch_neuronx and torch_xla; torchrun and "
        "torch.distributed are the real ones. No Neuron compiler or runtime, no transfer over EFA, "
        "and neither of torch-neuronx's backends (`xla`, `neuron`) has ever run here",
    ),
    ("NCCL", "gloo"),
)
TAIL = """
## Never run on the real thing
No GPU, NVSwitch, EFA device or Neuron device was at hand. These stand in for them in the tests:

| hardware | instead |
|---|---|
"""


def row_of(row: CoverageRow) -> str:
    """Return a line of the table."""
    verdicts = ", ".join(row.verdicts)
    cells = (row.name, row.source, row.threshold, verdicts, row.pace, row.reason, row.test)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def stand_ins() -> str:
    """Return what plays each kind of hardware."""
    return "".join(f"| {hardware} | {instead} |\n" for hardware, instead in STAND_INS)


def page() -> str:
    """Return the whole page."""
    return HEAD + "\n".join(map(row_of, coverage_rows())) + "\n" + TAIL + stand_ins()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
