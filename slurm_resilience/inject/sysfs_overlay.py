"""Lay changed files over the sysfs of a lab's node, and take them away again.

`sres inject` starts this program, which steps among the mounts of the node, and nothing else: from
within a lab another node's processes cannot be joined. Other nodes and the machine that carries the
lab see nothing of it, and a reboot of the node ends it. sresd reads the files as it reads any; of
the checks that the marker names it says that a person injected what they find.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from slurm_resilience import config
from slurm_resilience.errors import SresError, UsageError
from slurm_resilience.health.injected_tree import MARKER
from slurm_resilience.inject.fault_catalogue import InjectedFault, find_fault
from slurm_resilience.inject.sysfs_faults import ChangedFiles, changed_files
from slurm_resilience.lab.client import handle
from slurm_resilience.lab.machines import linux

PLACES = ("/sys/class", "/sys/devices/system", "/sys/devices/virtual")
"""Directories that a tree is laid over: each exists, and none has another mount below it."""
DIRECTORY = Path("/run/sres-node/injected")


class OverlayOrder(msgspec.Struct, frozen=True):
    """The task on a node."""

    socket: str
    """The lab keeper's."""
    node: str
    fault: str
    undo: bool = False


class Overlays:
    """The faults that are laid over this machine's tree; together one mount for each place."""

    def __init__(self, sysroot: Path) -> None:
        self._sysroot = sysroot
        self._tree = DIRECTORY / "tree"
        self._book = DIRECTORY / "faults.json"

    def inject(self, fault: InjectedFault) -> None:
        """Let a fault show.

        Raises:
            UsageError: the node shows nothing that it could happen to.
            OSError: a mount was refused, or the directory cannot be written.
        """
        faults = self._faults()
        if fault.name not in faults:
            self._lay({**faults, fault.name: changed_files(fault, self._sysroot)})

    def undo(self, fault: InjectedFault) -> None:
        """Let it end.

        Raises:
            UsageError: it is not injected.
            OSError: a mount was refused.
        """
        faults = self._faults()
        if faults.pop(fault.name, None) is None:
            raise UsageError(f"{fault.name} is not injected here")
        self._lay(faults)

    def _faults(self) -> dict[str, ChangedFiles]:
        if not self._below(MARKER).exists():
            # What an earlier boot has left counts no more: its mounts ended with it.
            shutil.rmtree(self._tree, ignore_errors=True)
            return {}
        data = self._book.read_bytes()
        return {**msgspec.json.decode(data, type=dict[str, dict[str, str]])}

    def _lay(self, faults: Mapping[str, ChangedFiles]) -> None:
        for place in PLACES:
            if (self._tree / place.lstrip("/")).exists():
                linux.unmount(self._below(place))
        shutil.rmtree(self._tree, ignore_errors=True)
        self._book.parent.mkdir(parents=True, exist_ok=True)
        self._book.write_bytes(msgspec.json.encode(faults))
        if not faults:
            return
        checks = sorted(find_fault(name).check for name in faults)
        files = {path: text for each in faults.values() for path, text in each.items()}
        for path, text in {**files, MARKER: "\n".join(checks)}.items():
            file = self._tree / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
        for place in PLACES:
            changed, below = self._tree / place.lstrip("/"), self._below(place)
            if changed.exists() and not below.is_dir():
                raise UsageError(f"{below} is not there: the node's kernel has no such hardware")
            if changed.exists():
                # Without an upper directory it is read-only, as sysfs is to most.
                linux.mount("overlay", str(below), "overlay", data=f"lowerdir={changed}:{below}")

    def _below(self, place: str) -> Path:
        return self._sysroot / place.lstrip("/")


def order_words(order: OverlayOrder) -> Sequence[str]:
    """Return the command line of this program."""
    return (sys.executable, "-P", "-m", __name__, msgspec.json.encode(order).decode())


def main() -> int:
    """Run the entry of the program."""
    order = msgspec.json.decode(sys.argv[1], type=OverlayOrder)
    try:
        overlays = Overlays(Path(config.load(None).agent.sysroot))
        linux.setns(handle(order.socket, order.node), linux.NEWNS)
        (overlays.undo if order.undo else overlays.inject)(find_fault(order.fault))
    except (SresError, OSError) as error:
        print(error, file=sys.stderr)
        return error.exit_code if isinstance(error, SresError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
