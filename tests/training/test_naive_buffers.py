"""Programs that write to buffers: ranks whose buffers differ are told of, and those that may have
their own are not."""

from __future__ import annotations

import pytest
from naive import USUAL, Program, told_nothing, warned

pytestmark = pytest.mark.training
pytest.importorskip("torch", reason="torch is not installed")

ALONE = USUAL.replace("s.ddp(model)", "model").replace(
    "    with s.update()", "    average(model, s.world)\n    with s.update()"
)
CODEBOOK = """
class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 1)
        self.register_buffer("codes", torch.zeros(8))

    def forward(self, x):
        self.codes.lerp_(x.mean(0), 0.1)
        return self.line(x - self.codes)

def build():
    torch.manual_seed(0)
    model = Codebook()
    return model, torch.optim.SGD(model.parameters(), 0.01)
"""
LATE_CODEBOOK = """
class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.norm = nn.Linear(8, 1), nn.BatchNorm1d(8)

    def forward(self, x):
        if not hasattr(self, "codes"):
            self.register_buffer("codes", torch.zeros(8))
        self.codes.lerp_(x.mean(0), 0.1)
        return self.line(self.norm(x - self.codes))

def build():
    torch.manual_seed(0)
    model = Codebook()
    return model, torch.optim.SGD(model.parameters(), 0.01)
"""
BROKEN_OFF = "exception:rank=1,step=2,phase=backward"
"""The other rank has done its forward by then."""
MICROBATCHES = """
model, opt = s.once(build)
s.track(model=model, opt=opt)
for step in s.microbatches(DATA, model, size=2, count=4, steps=4):
    for x, y in step:
        step.backward(nn.functional.mse_loss(model(x), y))
    with s.update():
        opt.step()
"""


@pytest.mark.parametrize(
    "body",
    [
        ALONE,
        USUAL.replace("s.ddp(model)", "s.ddp(model, broadcast_buffers=False)"),
        MICROBATCHES,
    ],
    ids=["without a wrapper", "not sent by it", "microbatches"],
)
def test_buffers_that_each_rank_has_of_its_own_are_told(run: Program, body: str) -> None:
    """Each rank trained another model, and no comparison looked at buffers."""
    warned(run(body, CODEBOOK), "step 1: buffers differ: rank 1 from rank 0 in model.codes")


def test_buffers_that_ddp_sends_are_told_nothing(run: Program) -> None:
    told_nothing(run(USUAL, CODEBOOK))


def test_buffers_that_ddp_does_not_know_are_told(run: Program) -> None:
    """DDP never sends those that forward makes in a module that had none when it was wrapped; after
    a fault it wrapped one that had some, and sent them."""
    parts = LATE_CODEBOOK.replace("nn.BatchNorm1d(8)", "nn.Identity()")
    warned(run(USUAL, parts), "step 1: buffers differ: rank 1 from rank 0 in model.codes")


def test_a_buffer_that_forward_makes_is_rolled_back(run: Program) -> None:
    """In a process that lived on, a step that was repeated changed it twice."""
    parts = LATE_CODEBOOK
    body = USUAL + '    say("codes", s.seat, [v.hex() for v in model.codes.tolist()])\n'
    told = [
        run(body, parts, inject=fault).stdout
        for fault in ("", "exception:rank=1,step=2,phase=backward")
    ]
    undisturbed, repeated = ({x for x in one.splitlines() if "codes" in x} for one in told)
    assert len(undisturbed) == 8 and undisturbed == repeated


def test_a_buffer_that_is_given_other_memory_is_rolled_back(run: Program) -> None:
    """It was told of in other words, as written after the update, and a fault put the first one
    back."""
    parts = CODEBOOK.replace("self.codes.lerp_(", "self.codes.data = self.codes.lerp(")
    told_nothing(run(USUAL, parts))
    body = USUAL + '    say("codes", s.seat, [v.hex() for v in model.codes.tolist()])\n'
    told = [
        run(body, parts, inject=fault).stdout
        for fault in ("", "exception:rank=1,step=2,phase=backward")
    ]
    undisturbed, repeated = ({x for x in one.splitlines() if "codes" in x} for one in told)
    assert len(undisturbed) == 8 and undisturbed == repeated


def test_a_large_buffer_that_is_written_through_data_is_rolled_back(run: Program) -> None:
    """A codebook that forward moves through `.data`: torch does not count that, and a step that was
    repeated moved it twice."""
    parts = CODEBOOK.replace("torch.zeros(8)", "torch.zeros(4096, 8)").replace(
        "self.codes.lerp_(", "self.codes.data.lerp_("
    )
    parts = parts.replace("x - self.codes", "x - self.codes[0]")
    told_nothing(run(USUAL, parts))
    body = USUAL + '    say("codes", s.seat, s.step, [v.hex() for v in model.codes[0].tolist()])\n'
    for step in (0, 2):
        told = [
            run(body, parts, inject=fault).stdout
            for fault in ("", f"exception:rank=1,step={step},phase=backward")
        ]
        undisturbed, repeated = ({x for x in one.splitlines() if "codes" in x} for one in told)
        assert len(undisturbed) == 8 and undisturbed == repeated


def test_a_buffer_that_one_rank_alone_changes_is_told(run: Program) -> None:
    """It was no parameter, and so it was never seen."""
    body = ALONE.replace("steps=4", "steps=12").replace(
        "opt.zero_grad()",
        "opt.zero_grad()\n        if s.rank == 1 and s.step == 6:\n            model.codes += 1",
    )
    parts = CODEBOOK.replace("        self.codes.lerp_(x.mean(0), 0.1)\n", "")
    done = run(body, parts, options="digest_every=1")
    warned(done, "step 7: buffers differ: rank 1 from rank 0 in model.codes")


AVERAGES = """
def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), 0.01)
"""
COUNTS = """
class Balanced(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("bias", torch.zeros(8))

    def forward(self, x):
        self.seen += x.detach().sum(0)
        return self.line(x + self.bias)

def build():
    torch.manual_seed(0)
    model = Balanced()
    return model, torch.optim.SGD(model.parameters(), 0.01)
"""


@pytest.mark.parametrize("parts", [AVERAGES, COUNTS], ids=["batch norm", "summed in each step"])
def test_buffers_that_ranks_may_have_of_their_own_are_told_nothing(
    run: Program, parts: str
) -> None:
    """A batch norm is the rank's own; what is counted in a step is exchanged before its update."""
    body = ALONE
    if parts is COUNTS:
        body = body.replace("    with", "    dist.all_reduce(model.seen)\n    with")
        body += "        model.bias -= 0.01 * model.seen.sign()\n        model.seen.zero_()\n"
    told_nothing(run(body, parts, options="digest_every=1"))


@pytest.mark.parametrize("place", ["after", "inside", "before"])
def test_a_buffer_that_is_written_after_the_update_is_told(run: Program, place: str) -> None:
    """A fault in the next step put it back, and one write was lost on all ranks alike."""
    parts = CODEBOOK.replace("        self.codes.lerp_(x.mean(0), 0.1)\n", "")
    write = "model.codes.lerp_(torch.full((8,), float(s.step)), 0.1)\n"
    if place == "after":
        done = run(ALONE + f"    {write}", parts)
        warned(done, "model.codes, a buffer, changed between s.update() and the next batch")
    elif place == "inside":
        told_nothing(run(ALONE + f"        {write}", parts))
    else:
        told_nothing(run(ALONE.replace("    with", f"    {write}    with"), parts))


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_averages_of_a_forward_after_the_update_are_told(run: Program, mode: str) -> None:
    """A validation in train mode: a fault in the next step put its averages back."""
    body = USUAL + f"    model.{mode}()(X)\n    model.train()\n"
    body = body.replace("    model.", "    with torch.no_grad(): model.", 1)
    done = run(body, AVERAGES)
    if mode == "train":
        warned(done, "a forward after the update is in eval mode")
    else:
        told_nothing(done)


def test_buffers_between_batches_of_one_update_are_told_nothing(run: Program) -> None:
    body = """
    model, opt = s.once(build)
    s.track(model=model, opt=opt)
    for number, (x, y) in enumerate(s.loader(DATA, global_batch=8, steps=8, epochs=None), 1):
        dist.all_reduce(x)
        nn.functional.mse_loss(model(x), y).backward()
        if number % 2 == 0:
            average(model, s.world)
            with s.update():
                opt.step()
                opt.zero_grad()
    """
    told_nothing(run(body, CODEBOOK))
