"""Keep this process known at the rendezvous, for as long as it takes part.

A shared directory may be full, read-only or away for a while, and what is old or seems to be of no
use may be removed from it. Processes that are connected need it for nothing; but one that comes
later needs the address of one of them, and the secret.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from slurm_resilience.clock import SYSTEM_CLOCK
from slurm_resilience.errors import SresError
from slurm_resilience.mesh.directory_looks import DirectoryLooks
from slurm_resilience.mesh.model import Peer
from slurm_resilience.mesh.rendezvous import Rendezvous, SharedDirectory
from slurm_resilience.mesh.speaker_files import SpeakerEntry

log = logging.getLogger("sres.mesh")

LOOK_SECONDS = 60.0
"""Between two looks whether the entry is still there."""
RETRY_SECONDS = 1.0
"""The same while it cannot be written."""
REFUSED_LOOK_SECONDS = 1.0
"""The same, at least, where others are refused."""
NEW_SECONDS, NEW_SECONDS_A_SEAT = 5.0, 0.01
"""The same before this process was in a world: there may be another secret by now. Rarer where many
may look."""


class RendezvousEntry:
    """The entry of one process."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        me: Peer,
        on_secret: Callable[[bytes], None] = lambda _: None,
        *,
        is_lent: bool = False,
    ) -> None:
        """
        Args:
            rendezvous: where others find this process.
            me: this process, with its port.
            on_secret: called, in a thread, with another secret that has come to count beside those
                that this process has.
            is_lent: this process is on a lent node: those that replace the job's own ranks must
                know that it lives.
        """
        self._is_lent = is_lent
        self._on_secret = on_secret
        self._in_world = threading.Event()
        self._rendezvous = rendezvous
        self._me = me
        self._is_written = False
        files = rendezvous.speakers if isinstance(rendezvous, SharedDirectory) else None
        self.speaker = SpeakerEntry(files, me)
        self.looks = DirectoryLooks()
        """Looks at what others have written there."""
        self._problem = ""
        """As it was told last."""
        self._due = threading.Event()
        self._refused_at = float("-inf")
        self._closing = False

    def begin(self) -> None:
        """Make this process known, and keep it so.

        Raises:
            OSError, UsageError: it cannot be written down, and is the first one of its seat. At a
                start, processes that do not find each other would train apart.
        """
        self.announce()
        if isinstance(self._rendezvous, SharedDirectory):
            # A thread of its own: a shared file system may hang.
            threading.Thread(target=self._keep, name="sres-entry", daemon=True).start()

    def announce(self) -> None:
        """Make this process known. Raises what `begin` does."""
        if self._me.incarnation == 0:
            self._rendezvous.enter(self._me)
        # Not the first of the training: those on lent nodes come later.
        is_late = self._me.incarnation > 0 or self._is_lent
        if is_late and isinstance(self._rendezvous, SharedDirectory):
            with contextlib.suppress(OSError):
                self._rendezvous.note_removal()
        self.write()

    def speaks(self) -> None:
        """Have it written down that this process speaks for its node."""
        if self.speaker.speaks():
            self._due.set()

    @property
    def pause(self) -> float:
        """Return the seconds until the next look whether the entry is still there."""
        if not self._is_written:
            return RETRY_SECONDS
        new = max(NEW_SECONDS, NEW_SECONDS_A_SEAT * self._me.seats)
        return LOOK_SECONDS if self._in_world.is_set() else new

    def entered(self) -> None:
        """Note that this process trains with others."""
        if self._is_lent and not self._in_world.is_set():
            self._due.set()
        self._in_world.set()

    def look(self) -> None:
        """Look soon whether the entry is still there: others may come."""
        self._due.set()

    def look_at_refusal(self, now: float) -> bool:
        """Look soon, since another process had another secret: the one in the directory may be
        new. Strangers may be refused as well, so that it is looked at rarely.

        Returns:
            Will it be?
        """
        if now - self._refused_at < REFUSED_LOOK_SECONDS:
            return False
        self._refused_at = now
        self._due.set()
        return True

    def look_at_hang_up(self, now: float) -> bool:
        """Do the same where one that was dialed hung up: those that came after the directory was
        removed find this process nowhere, and dial it not. One that was in no world looks often;
        where many start at once, they hang up on each other for other reasons.

        Returns:
            Will it be?
        """
        return self._in_world.is_set() and self.look_at_refusal(now)

    def end(self) -> None:
        """Take the entry back."""
        self._closing = True
        self._due.set()
        self._rendezvous.leave(self._me)

    def _keep(self) -> None:
        while not self._closing:
            SYSTEM_CLOCK.wait(self._due, self.pause)
            self._due.clear()
            if not self._closing:
                self.write()
        self._rendezvous.leave(self._me)

    def write(self) -> None:
        """Write the entry, if it is not there. A failure ends no process: it dials all that are
        there, and those tell the others."""
        try:
            self._rendezvous.enter(self._me)
            self._look_at_secret()
            self._note_state()
            if not self._closing:
                self.speaker.write()
        except (OSError, SresError) as error:
            self._is_written = False
            problem = error.strerror if isinstance(error, OSError) else str(error)
            if problem != self._problem:
                text = "others cannot find this process by itself (%s); it is tried again"
                log.warning(text, problem)
            self._problem = problem or ""
        else:
            self._is_written, self._problem = True, ""

    def _note_state(self) -> None:
        """Tell that this process has the state, where those that come may need to know."""
        is_due = self._is_lent and self._in_world.is_set() and not self._closing
        if is_due and isinstance(self._rendezvous, SharedDirectory):
            self._rendezvous.note_state(self._me)

    def _look_at_secret(self) -> None:
        """Have one secret in common with the others. One that came while the directory was gone has
        made another, and would never be let in."""
        secret = self._rendezvous.other_secret()
        if secret is not None:
            log.warning("there is another secret since the directory was removed: it counts too")
            self._on_secret(secret)
