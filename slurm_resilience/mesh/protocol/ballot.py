"""The vote before a world is entered: the lead's question, and what a voter has promised. Pure.

A lead asks all peers that are present; each promises its vote to one number at a time, and never
to a lower one. The lead forms the world when all its members have voted for it, and with them
enough of each world that may go on already (`world_plan.other_side`).

A world *may go on* from the moment in which one of its members adopted it. A voter that is no
member of it counts it from its vote on: it cannot know. A member that has not adopted a world and
has voted for a newer one never adopts it, so the older one is void.
"""

from __future__ import annotations

from collections.abc import Iterable

from slurm_resilience.mesh.messages import Vote, VoteRequest
from slurm_resilience.mesh.model import View

LONGEST_WAIT_SECONDS = 4.0
"""Between two requests for the same votes."""


class PossibleWorlds:
    """The worlds that may go on: the newest that worked, and newer ones that perhaps did."""

    def __init__(self) -> None:
        self.worked: View | None = None
        self._newer: dict[int, View] = {}

    def add(self, view: View) -> None:
        """Count a world that may go on."""
        if view.generation > self.worked_number:
            self._newer[view.generation] = view

    def learn(self, view: View) -> None:
        """Note a world that worked: all older ones are over."""
        if view.generation > self.worked_number:
            self.worked = view
            self._newer = {n: newer for n, newer in self._newer.items() if n > view.generation}

    def note_worked(self, number: int) -> None:
        """Note that one of them has worked, if it is one of them."""
        if number in self._newer:
            self.learn(self._newer[number])

    @property
    def worked_number(self) -> int:
        """Return the number of the newest world that worked; 0: none."""
        return self.worked.generation if self.worked else 0

    def all(self) -> tuple[View, ...]:
        """Return all of them, the oldest first."""
        newer = tuple(self._newer[number] for number in sorted(self._newer))
        return (self.worked, *newer) if self.worked else newer

    def numbers(self) -> tuple[int, ...]:
        """Return the numbers of all of them."""
        return tuple(view.generation for view in self.all())

    def members(self) -> set[str]:
        """Return the ids of all their members."""
        return {member.peer.id for view in self.all() for member in view.members}

    def drop_void(self, member: str, number: int, known: Iterable[int], worked: int) -> None:
        """Forget the worlds that a member never adopted, and will not adopt any more.

        Args:
            member: a peer.
            number: of a newer world that it has voted for.
            known: all worlds that may go on, as it knows them.
            worked: the newest of them that worked.
        """
        kept = {worked, *known}
        for older, view in list(self._newer.items()):
            if worked < older < number and older not in kept and view.rank_of(member) >= 0:
                del self._newer[older]


class Promise:
    """The newest number that this process has voted for, and for whom it holds its vote."""

    def __init__(self) -> None:
        self._view = View(0, ())
        self.lead = ""
        self.until = 0.0
        """Until when no other lead gets a vote, for the world may be formed at any moment."""

    @property
    def number(self) -> int:
        """Return the newest number that this process has voted for."""
        return self._view.generation

    def give(self, view: View, lead: str, until: float) -> None:
        """Vote."""
        self._view, self.lead, self.until = view, lead, until

    def view_of(self, number: int) -> View | None:
        """Return the world of a number; None: it is not the newest that this process voted for."""
        return self._view if 0 < number == self.number else None

    def release(self) -> None:
        """Be free for another lead; the number stays."""
        self.lead, self.until = "", 0.0

    def held_for(self, now: float) -> str:
        """Return the lead that this process has voted for just now; empty: none."""
        return self.lead if now < self.until else ""


class Ballot:
    """A world that the lead has asked for, and the answers."""

    def __init__(self, view: View, lead: str, now: float, wait: float) -> None:
        self.view = view
        self.again_at = now + wait
        """When those that did not answer are asked again; or all, after a refusal."""
        self._lead, self._wait = lead, wait
        self.refused = False
        self.promised = 0
        """The newest number that a voter has voted for."""
        self.voted = {lead}
        self._votes: dict[str, Vote] = {}
        self._asked = {lead}
        self.missing: set[str] = set()
        """Those that have not answered."""
        self._members = {member.peer.id for member in view.members}

    def add(self, present: set[str]) -> set[str]:
        """Ask these too; return those that were not asked before."""
        new = present - self._asked
        self._asked |= new
        self.missing |= new
        return new

    @property
    def longer_wait(self) -> float:
        """Return the seconds until the request after the next."""
        return min(2 * self._wait, LONGEST_WAIT_SECONDS)

    def ask_again(self, now: float, all_of_them: bool) -> None:
        """Ask those again that did not answer, or all: they may know more now. Ever less often."""
        self._wait = self.longer_wait
        self.again_at = now + self._wait
        if all_of_them:
            self.missing = self._asked - {self._lead}

    def count(self, voter: str, vote: Vote) -> None:
        """Take an answer in."""
        self.missing.discard(voter)
        self.promised = max(self.promised, vote.promised)
        if vote.granted:
            self.voted.add(voter)
            self._votes[voter] = vote
        else:
            self.refused = True

    def drop_void(self, worlds: PossibleWorlds) -> None:
        """Forget the worlds that the votes show to be void."""
        for voter, vote in self._votes.items():
            worlds.drop_void(voter, vote.generation, vote.possible, vote.worked)

    @property
    def is_full(self) -> bool:
        """Tell whether all members have voted for it."""
        return self._members <= self.voted


def answer(
    request: VoteRequest, granted: bool, promised: int, worlds: PossibleWorlds, dead: Iterable[str]
) -> Vote:
    """Return the answer to a lead, with what it may not know."""
    members = worlds.members()
    return Vote(
        request.view.generation,
        granted,
        promised,
        worlds.worked_number,
        worlds.numbers(),
        tuple(
            view
            for view in worlds.all()
            if view.generation > request.worked and view.generation not in request.known
        ),
        tuple(sorted(members.intersection(dead))),
    )
