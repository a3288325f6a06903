"""Programs that make an optimizer, a schedule or averages in the middle of the training, as a user
would write them: they are told of it at the second update with it."""

from __future__ import annotations

from textwrap import dedent

import pytest
from naive import USUAL, Program, told_nothing, warned

pytestmark = pytest.mark.training
pytest.importorskip("torch", reason="torch is not installed")

LATER = """
model, opt = s.once(build)
s.track(model=model, opt=opt)
net, part = s.ddp(model), None
for x, y in s.loader(DATA, global_batch=8, steps=12, epochs=None):
    nn.functional.mse_loss(net(x), y).backward()
    with s.update():
        if s.step < 6 or not {swaps}:
            opt.step()
        if s.step >= 6:
            part = part or {made}
            {use}
        model.zero_grad()
"""
STEP = "part.step()"
PARTS = {
    "schedule": ("torch.optim.lr_scheduler.StepLR(opt, 2)", STEP, False, "StepLR"),
    "plateau": (
        "torch.optim.lr_scheduler.ReduceLROnPlateau(opt)",
        "part.step(1.0)",
        False,
        "ReduceLROnPlateau",
    ),
    "average": (
        "torch.optim.swa_utils.AveragedModel(model)",
        "part.update_parameters(model)",
        False,
        "AveragedModel",
    ),
    "another optimizer": (
        "torch.optim.Adam(model.parameters(), 1e-3)",
        STEP,
        True,
        "Adam",
    ),
}


@pytest.mark.parametrize("kind", PARTS)
def test_what_is_made_in_the_middle_is_told(run: Program, kind: str) -> None:
    """It began anew after a fault, on all ranks alike, without a word: with no momentum, with the
    first learning rate, with averages of the weights as they were then."""
    made, use, swaps, words = PARTS[kind]
    done = run(LATER.format(made=made, use=use, swaps=swaps))
    warned(done, f"{words} belongs to the training and is not tracked")


LATE_COPY = """
from copy import deepcopy
def filled(other, model):
    other.load_state_dict(model.state_dict())
    return other
model, opt = s.once(build)
s.track(model=model, opt=opt)
net, part, kept = s.ddp(model), None, []
for x, y in s.loader(DATA, global_batch=8, steps=12, epochs=None):
    nn.functional.mse_loss(net(x), y).backward()
    with s.update():
        opt.step()
        opt.zero_grad()
    if s.step >= 4:
        {}
"""
COPIES = {
    "module": ("deepcopy(model)", "part.parameters()"),
    "module of its own": ("filled(nn.Linear(8, 1), model)", "part.parameters()"),
    "list": ("[p.detach().clone() for p in model.parameters()]", "part"),
    "dict": ("{k: v.clone() for k, v in model.state_dict().items()}", "part.values()"),
}


@pytest.mark.parametrize("kind", COPIES)
def test_averages_in_a_copy_that_is_made_in_the_middle_are_told(run: Program, kind: str) -> None:
    """They began anew after a fault, from the weights as they were then, without a word."""
    made, values = COPIES[kind]
    more = f"""
        part = part or {made}
        with torch.no_grad():
            for one, now in zip({values}, model.parameters()):
                one.lerp_(now, 0.1)
    """
    done = run(LATE_COPY.format(more.strip()))
    warned(done, "nearly their values is written to and not tracked")
    assert "a copy of the weights" not in done.stderr


def test_a_copy_that_is_made_in_the_middle_and_stays_is_told(run: Program) -> None:
    """A teacher: after a fault it was another one."""
    done = run(LATE_COPY.format("part = part or deepcopy(model)"))
    warned(done, "a copy of the weights (Linear) is made in the training function")
    assert "is written to" not in done.stderr


PASSING = {
    "for a validation": "deepcopy(model).eval()(x)",
    "for one step": "part = deepcopy(model)",
    "in a module of its own": "part = filled(part or nn.Linear(8, 1), model)",
    "to save them": """
        kept = kept or {k: v.clone() for k, v in model.state_dict().items()}
        for name, one in model.state_dict().items():
            kept[name].copy_(one)
    """,
    "of many steps": "kept.append([p.detach().clone() for p in model.parameters()])",
}


@pytest.mark.parametrize("what", PASSING)
def test_copies_that_a_fault_does_no_harm_are_told_nothing(run: Program, what: str) -> None:
    told_nothing(run(LATE_COPY.format(PASSING[what].strip())))


SHARDED = """
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
fully_shard(model, mesh=s.mesh()["shard"])
opt = torch.optim.SGD(model.parameters(), 0.01)
s.track(model=model, opt=opt)
part = None
for x, y in s.loader(DATA, global_batch=8, steps=12, epochs=None):
    nn.functional.mse_loss(model(x), y).backward()
    with s.update():
        opt.step()
        opt.zero_grad()
    if s.step >= {first}:
        part = part or [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            {use}
"""


@pytest.mark.parametrize(
    ("use", "first", "is_told"),
    [
        ("[one.lerp_(p, 0.1) for one, p in zip(part, model.parameters())]", 1, True),
        ("[one.lerp_(p, 0.1) for one, p in zip(part, model.parameters())]", 5, True),
        ("torch._foreach_lerp_(part, list(model.parameters()), 0.1)", 5, True),
        ("[one.copy_(p) for one, p in zip(part, model.parameters())]", 5, False),
        ("pass", 1, False),
    ],
)
def test_averages_of_shards_are_told(run: Program, use: str, first: int, is_told: bool) -> None:
    """They were passed over, and began anew after each fault."""
    done = run(SHARDED.format(first=first, use=use), options="replica_size=2")
    if is_told:
        warned(done, "a list with the parameters' shapes and nearly their values is written to")
    else:
        told_nothing(done)


def test_the_shards_of_the_last_world_are_no_copy(run: Program) -> None:
    options = "replica_size=2, partner_every=1"
    body = SHARDED.format(first=1, use="pass")
    done = run(body, options=options, inject="exception:rank=1,step=3,phase=backward")
    assert done.returncode == 0 and "generation 2" in done.stderr, done.stderr[-4000:]
    assert "copy of the weights" not in done.stderr, done.stderr[-4000:]


def test_an_optimizer_in_the_place_of_the_tracked_one_is_told(run: Program) -> None:
    """Made anew right after s.track: the tracked one never steps."""
    body = USUAL.replace("net = ", "opt = torch.optim.Adam(model.parameters())\nnet = ")
    warned(run(body), "trained by an optimizer that is not tracked (Adam)")


WRAPPER = """
class Lookahead(torch.optim.Optimizer):
    def __init__(self, inside):
        {init}
        self.inside = inside
        self.param_groups = inside.param_groups
        self.state = inside.state

    def step(self):
        self.inside.step()

    def zero_grad(self):
        self.inside.zero_grad()
"""


@pytest.mark.parametrize("init", ["pass", "super().__init__(inside.param_groups, {})"])
@pytest.mark.parametrize("tracked", ["opt", "part"])
@pytest.mark.parametrize("late", [False, True])
def test_an_optimizer_in_another_is_told_nothing(
    run: Program, init: str, tracked: str, late: bool
) -> None:
    """The one or the other is tracked; the wrapper is made where the model is, or later."""
    body = USUAL.replace("s.track(", "part = s.once(Lookahead, opt)\ns.track(")
    body = body.replace("opt=opt)", f"opt={tracked})").replace("opt.step()", "part.step()")
    if late and tracked == "opt":
        body = USUAL.replace(
            "        opt.step()", "        (Lookahead(opt) if s.step > 1 else opt).step()"
        )
        body = body.replace("steps=4", "steps=8")
    told_nothing(run(body, dedent(WRAPPER).format(init=init)))


def test_what_is_made_late_and_trains_something_else_is_told_nothing(run: Program) -> None:
    """A probe that is fitted to the model's outputs now and then; a schedule of its own."""
    body = USUAL.replace("steps=4", "steps=8")
    body += """
    if s.step >= 4:
        probe = nn.Linear(1, 1)
        inner = torch.optim.SGD(probe.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.StepLR(inner, 1)
        probe(y).square().mean().backward()
        inner.step()
        schedule.step()
"""
    told_nothing(run(body))


def test_what_the_function_makes_anew_and_tracks_is_told_nothing(run: Program) -> None:
    """A schedule that is made whenever the function is called, before s.track."""
    body = USUAL.replace("steps=4", "steps=10").replace(
        "s.track(model=model, opt=opt)",
        "part = torch.optim.lr_scheduler.StepLR(opt, 4)\ns.track(model=model, opt=opt, part=part)",
    )
    done = run(body + "        part.step()\n", inject="exception:rank=1,step=5")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "generation 2" in done.stderr
    assert "not tracked" not in done.stderr, done.stderr[-4000:]


def test_a_model_that_is_wrapped_and_not_tracked_is_told(run: Program) -> None:
    """A model of rewards that the loop trains too: each replaced rank began with a new one."""
    parts = """
    def rewards():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 1))
        return model, torch.optim.SGD(model.parameters(), 0.01)

    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)
    """
    body = USUAL.replace("s.track", "other, other_opt = rewards()\ns.track")
    body = body.replace("net = s.ddp(model)", "more, net = s.ddp(other), s.ddp(Outer(model))")
    body = body.replace("    with", "    nn.functional.mse_loss(more(x), y).backward()\n    with")
    body += "        other_opt.step()\n        other_opt.zero_grad()\n"
    warned(run(body, parts), "s.ddp(Sequential): it trains 0.weight, 0.bias, not tracked")
    kept = run(body.replace("rewards()", "s.once(rewards)"), parts)
    warned(kept, "s.ddp(Sequential): it trains 0.weight, 0.bias, not tracked")
    assert "kept by s.once" not in kept.stderr, "one cause, one line"
    tracked = body.replace("opt=opt)", "opt=opt, other=other, other_opt=other_opt)")
    told_nothing(run(tracked, parts))
    own = """
    class Own:
        def __init__(self, *parts):
            self.parts = parts

        def state_dict(self):
            return {str(number): one.state_dict() for number, one in enumerate(self.parts)}

        def load_state_dict(self, state):
            for number, one in enumerate(self.parts):
                one.load_state_dict(state[str(number)])
    """
    body = body.replace("opt=opt)", "opt=opt, own=Own(other, other_opt))")
    told_nothing(run(body, parts + own))
