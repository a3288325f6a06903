"""Messages from a step to `sres deepcheck`, over the step's standard output. Pure.

srun passes the output of its tasks on in pieces of about a kilobyte, and those of different tasks
in any order. So a message is cut into lines that are shorter than such a piece; each bears its
sender, and they are put together again by sender. Lines of other origin (a library's warning) are
ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from slurm_resilience.deepcheck.collective_math import Sweep
from slurm_resilience.deepcheck.deep_results import DeepResult

LINE_CHARACTERS = 800
MAX_MESSAGE_CHARACTERS = 1_000_000
_LINE = re.compile(r"@sres (?P<sender>\S{1,100}) (?P<more>[+.]) (?P<text>.*)")


class CheckBegun(msgspec.Struct, frozen=True, tag="begun"):
    """A check of a node begins."""

    node: str
    check: str


class CheckEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A check of a node has ended."""

    node: str
    result: DeepResult


class ChecksDone(msgspec.Struct, frozen=True, tag="done"):
    """All checks of a node have ended."""

    node: str


class GroupSwept(msgspec.Struct, frozen=True, tag="swept"):
    """The first rank of a group has measured a collective."""

    group: int
    sweep: Sweep


class GroupTrouble(msgspec.Struct, frozen=True, tag="trouble"):
    """A rank could not take part, or lost the others."""

    group: int
    node: str
    text: str
    missing: bool = False
    """It lacks a program or library: that says nothing of the node."""


class Burned(msgspec.Struct, frozen=True, tag="burned"):
    """One device has been loaded."""

    device: str
    multiplications: int
    wrong: int
    """Elements of products with another value than they should have."""
    memory_bytes: int
    memory_wrong: int
    """Words that were read back as something else."""
    gigaflops: float


class NeuronTrained(msgspec.Struct, frozen=True, tag="trained"):
    """A Neuron core has trained a model whose weights are known."""

    steps: int
    wrong: int
    """Weights with another value than they should have, of all rounds."""


class SpeedTold(msgspec.Struct, frozen=True, tag="speed"):
    """A short measure of one device."""

    node: str
    device: str
    """Its serial number."""
    peers: str
    """The kind of hardware, whose speeds can be compared."""
    kind: str
    value: float
    """More is better."""
    partner: str = ""
    """The node at the other end of a link."""


StepMessage = (
    CheckBegun
    | CheckEnded
    | ChecksDone
    | GroupSwept
    | GroupTrouble
    | Burned
    | NeuronTrained
    | SpeedTold
)
_DECODER: msgspec.json.Decoder[StepMessage] = msgspec.json.Decoder(StepMessage)


def as_lines(sender: str, message: StepMessage) -> Iterator[str]:
    """Yield the lines of a message, without line ends."""
    text = msgspec.json.encode(message).decode("utf-8")
    # Lines are cut by characters and counted by bytes: beyond ASCII one takes up to four.
    text = "".join(c if c.isascii() else f"\\u{ord(c):04x}" for c in text if ord(c) < 0x10000)
    pieces = [text[at : at + LINE_CHARACTERS] for at in range(0, len(text), LINE_CHARACTERS)]
    for number, piece in enumerate(pieces, 1):
        yield f"@sres {sender} {'.' if number == len(pieces) else '+'} {piece}"


class LineAssembler:
    """Puts messages together again."""

    def __init__(self) -> None:
        self._begun: dict[str, str] = {}

    def feed(self, line: str) -> StepMessage | None:
        """Return the message that a line completes, if it does."""
        match = _LINE.fullmatch(line.rstrip("\r\n"))
        if match is None:
            return None
        text = self._begun.pop(match["sender"], "") + match["text"]
        if match["more"] == "+":
            if len(text) <= MAX_MESSAGE_CHARACTERS:
                self._begun[match["sender"]] = text
            return None
        try:
            return _DECODER.decode(text)
        except msgspec.MsgspecError:
            return None
