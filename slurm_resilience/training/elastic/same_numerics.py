"""See whatever would give the same microbatch other bits on another rank, or in another world."""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from slurm_resilience.errors import UsageError
from slurm_resilience.training import compat
from slurm_resilience.training.content_digest import content_digest


def numerics(device: torch.device) -> dict[str, str]:
    """Return all that decides by which kernels, in which order, this process computes."""
    found = {
        "torch": str(torch.__version__),
        "threads (OMP_NUM_THREADS, torch.set_num_threads)": str(torch.get_num_threads()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "processor": f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "device": device.type,
    }
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["deterministic algorithms"] = str(torch.are_deterministic_algorithms_enabled())
        found["cuDNN's benchmark"] = str(torch.backends.cudnn.benchmark)
    return found


@functools.cache
def _processor() -> str:
    """Return the processor's name as the kernel tells it; empty: it does not."""
    # Line by line: the kernel takes a while for hundreds of processors.
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return ""


def refuse_differences(said: Sequence[dict[str, str]]) -> None:
    """Compare what all ranks said.

    Raises:
        UsageError: two compute in different ways, or a GPU may compute differently each time.
    """
    for rank, words in enumerate(said):
        for name, value in words.items():
            if said[0].get(name) != value:
                raise UsageError(
                    f"same_bits=True: rank {rank} has another {name} than rank 0: {value!r}, and "
                    f"{said[0].get(name)!r}; start all ranks alike"
                )
    if said[0].get("deterministic algorithms") == "False":
        raise UsageError(
            "same_bits=True on a GPU needs torch.use_deterministic_algorithms(True), and "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment"
        )


def compare_ranks(device: torch.device, world: int) -> None:
    """Compare this rank with all others. A collective; one number of each, as long as all agree.

    Raises:
        UsageError: they compute in different ways.
    """
    own = numerics(device)
    said = [own]
    if world > 1:
        where = compat.wire_device(dist.group.WORLD)
        word = torch.tensor([content_digest(own)], dtype=torch.int64, device=where)
        words = [torch.empty_like(word) for _ in range(world)]
        dist.all_gather(words, word, group=None)
        if len({int(one) for one in words}) > 1:
            said = [own] * world
            dist.all_gather_object(said, own)
    refuse_differences(said)


class BufferLook(enum.Enum):
    """State of the watch over buffers: CLOSE → GLANCE → CLOSE → DONE. In the first step, values are
    compared; later, versions; where one changes, the next step's values, once more."""

    CLOSE = "values are compared"
    GLANCE = "versions are compared"
    DONE = "no more: forward writes the value that is there"


class BufferWatch:
    """Sees buffers that a forward changes: each rank's would depend on the microbatches it had."""

    def __init__(self, nets: Sequence[nn.Module]) -> None:
        self._nets = nets
        self._look = BufferLook.CLOSE
        self._is_first = True
        self._before: dict[str, torch.Tensor] = {}
        self._buffers = [one for net in nets for one in net.buffers()]
        self._versions: list[int] = []

    def begin(self) -> None:
        """Note what there is before the forwards of a step. What the program does between two steps
        is its own."""
        if self._look is BufferLook.CLOSE:
            self._before = self._copy()
        # Batch norm counts only its number of batches, and not its averages, as changed.
        self._versions = compat.versions(self._buffers)

    def refuse_changes(self) -> None:
        """Look at the end of a step's forwards. A norm that is in train mode from some step on
        (`net.train()` after a validation) is found in the second one.

        Raises:
            UsageError: a buffer has another value.
        """
        if self._look is BufferLook.CLOSE:
            self._compare()
            self._look = BufferLook.GLANCE if self._is_first else BufferLook.DONE
            self._is_first, self._before = False, {}
        elif self._look is BufferLook.GLANCE and compat.versions(self._buffers) != self._versions:
            self._look = BufferLook.CLOSE

    def _compare(self) -> None:
        now = self._copy()
        for name, before in self._before.items():
            value = now.get(name)
            if value is not None and value.shape == before.shape and not torch.equal(value, before):
                raise UsageError(
                    f"same_bits=True: forward changes the buffer {name}, which then depends on the "
                    "rank. Use a norm without running averages (GroupNorm, LayerNorm), or "
                    "put it into eval mode"
                )

    def _copy(self) -> dict[str, torch.Tensor]:
        return {
            name: buffer.detach().clone()
            for net in self._nets
            for name, buffer in net.named_buffers()
        }
