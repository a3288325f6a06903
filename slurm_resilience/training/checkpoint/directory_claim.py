"""A file in a directory of checkpoints that names the training which wrote there last.

A directory is for one training. A second one (the same script submitted twice, say) would load what
the first has saved, and take its checkpoints for its own. A training that comes after another one
is no second one, so a claim counts only when it is lost while its training runs.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from slurm_resilience.resume import attempt

FILE = "written-by"
MAX_BYTES = 1000


class DirectoryClaim:
    """One process's claim of a directory for its training."""

    def __init__(self, directory: Path, environment: Mapping[str, str] = os.environ) -> None:
        """
        Args:
            directory: of checkpoints.
            environment: tells the training: it is the same for all of its processes, and for those
                that replace them.
        """
        self._path = directory / FILE
        where = environment.get("SRES_DIR") or environment.get("SRES_MEET", "")
        job = environment.get("SLURM_JOB_ID", "")
        self.training = " ".join(filter(None, (job and f"job {job}", where and f"({where})")))
        """Empty: nothing tells this training from others."""
        self._is_ours = False

    def renew(self) -> str:
        """Claim the directory.

        Returns:
            The training that has claimed it since this process did; empty: none has.
        """
        if not self.training or not attempt.is_current():
            return ""
        other = self._read() if self._is_ours else ""
        draft = self._path.with_name(f".{FILE}-{os.getpid()}-{secrets.token_hex(4)}")
        try:
            draft.write_text(self.training + "\n", encoding="utf-8", errors="surrogateescape")
            draft.replace(self._path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()
            self._is_ours = False  # a save says by itself what is wrong with the disk
        else:
            self._is_ours = True
        return other if other != self.training else ""

    def _read(self) -> str:
        try:
            with self._path.open(encoding="utf-8", errors="surrogateescape") as file:
                text = file.read(MAX_BYTES).strip()
                return "".join(char if char.isprintable() else "?" for char in text)
        except OSError:
            return ""
