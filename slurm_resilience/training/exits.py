"""The ways in which a process of the training ends."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import threading
import traceback
from typing import NoReturn

from slurm_resilience.launcher import exit_codes
from slurm_resilience.mesh.mesh import Mesh
from slurm_resilience.mesh.model import GenerationEnd
from slurm_resilience.mesh.rendezvous import Rendezvous
from slurm_resilience.training.participant import Participant
from slurm_resilience.training.recovery import log_lines

log = logging.getLogger("sres.training")


def end_fork(error: BaseException | None) -> NoReturn:
    """End a process that was forked in the block and leaves it, as it would have ended by itself.
    The mesh, the process group's sockets and the place to meet are the rank's that forked it.

    Args:
        error: what it leaves by; None: it returns.
    """
    code = error.code if isinstance(error, SystemExit) else 1
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if error is None:
            log.error(
                "a process that was forked in the function returned from it, and ends: it takes "
                "no part in the training"
            )
        elif not isinstance(error, SystemExit):
            traceback.print_exception(error)
        elif code is not None and not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def refuse_child() -> None:
    """End a child that multiprocessing has started (spawn, forkserver), and that only imports the
    program anew to find its functions. It would take the seat of the rank that started it.

    Raises:
        SystemExit: this is such a child.
    """
    if not getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    raise SystemExit(
        "sres: this child of a rank imports the program anew, and would train in the rank's place: "
        'call the training function under `if __name__ == "__main__":` (multiprocessing with spawn '
        "or forkserver, DataLoader's workers among it, imports the program in each child)"
    )


class Exits:
    """Each closes the mesh and raises SystemExit, but for `done`, after which the program goes on.
    Where the training runs in another thread than the main one, the process ends at once.

    Args:
        mesh: this process among the others.
        rendezvous: where those who come later look how the training ended.
        participant: knows the last step.
    """

    def __init__(self, mesh: Mesh, rendezvous: Rendezvous, participant: Participant) -> None:
        self._mesh = mesh
        self._rendezvous = rendezvous
        self._participant = participant

    def replaced(self) -> NoReturn:
        """Have this process replaced: a fresh one can do what this one cannot."""
        self._leave(exit_codes.POISONED)

    def departed(self) -> NoReturn:
        """End well, before the training does: the others go on without this process."""
        log.info("left the training after step %d", self._participant.step)
        self._leave(exit_codes.DONE)

    def given_up(self, reason: str) -> NoReturn:
        """End all processes: the training cannot go on."""
        view = self._mesh.current
        if view is not None:
            self._mesh.stop(GenerationEnd(view.generation, reason, self._mesh.me.id, "stop"))
        self._rendezvous.outcome(exit_codes.STOP, self._participant.step, reason)
        self.stopped(reason)

    def stopped(self, reason: str) -> NoReturn:
        """Another process gave the training up."""
        log_lines.write(f"sres: the training gave up: {reason}\n")
        self._leave(exit_codes.STOP)

    def done(self) -> None:
        """Note that the training is complete, for those who come later or did not hear of it; the
        mesh is closed. Any process may be the only one that is left to write it down."""
        if self._rendezvous.ended() is not None:
            return
        last, *_ = self._mesh.picture()
        seats = [] if last is None else [member.peer.seat for member in last.members]
        self._rendezvous.outcome(exit_codes.DONE, self._participant.step, "", seats)

    def _leave(self, code: int) -> NoReturn:
        self._mesh.close()
        log_lines.write_out()
        if code != exit_codes.DONE and threading.current_thread() is not threading.main_thread():
            # It would end this thread alone, and later the program, with exit code 0.
            os._exit(code)
        raise SystemExit(code)
