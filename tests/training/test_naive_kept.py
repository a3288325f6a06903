"""Programs that keep by `s.once` what changes from step to step, and do not track it."""

from __future__ import annotations

import pytest
from naive import USUAL, Program, told_nothing, warned

pytestmark = pytest.mark.training
pytest.importorskip("torch", reason="torch is not installed")

KEPT = {
    "a curriculum": ("Curriculum", "kept.length", "kept.grow()", "Curriculum.length"),
    "experiences": ("Experiences", "kept.draw()", "kept.add(x)", "Experiences.seen"),
    "weights": ("torch.ones, 8", "kept.mean()", "kept.add_(1)", "Tensor"),
    "an array": ("np.ones, 8", "float(kept.mean())", "kept += 1", "ndarray"),
    "a list": ("list", "len(kept)", "kept.append(x)", "a list"),
    "in a tuple": ("lambda: (0, Curriculum())", "kept[1].length", "kept[1].grow()", "Curriculum"),
}
PARTS = """
import collections
import numpy as np

class Curriculum:
    def __init__(self):
        self.length = 1

    def grow(self):
        self.length += 1

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)

class Experiences:
    def __init__(self):
        self.seen = collections.deque([torch.ones(1)], maxlen=9)

    def draw(self):
        return self.seen[0].mean()

    def add(self, x):
        self.seen.append(x)
"""


def _body(made: str, read: str, changed: str) -> str:
    body = USUAL.replace("s.track", f"kept = s.once({made})\ns.track")
    return body.replace("net(x)", f"net(x) * {read}").replace(
        "opt.step()", f"opt.step()\n        {changed}"
    )


@pytest.mark.parametrize("kind", KEPT)
def test_what_once_keeps_and_nothing_tracks_is_told(run: Program, kind: str) -> None:
    """A step that was repeated changed it twice, and a replaced rank began with a new one."""
    made, read, changed, name = KEPT[kind]
    done = run(_body(made, read, changed), PARTS)
    warned(done, f"sres: seat 0: {name}")
    warned(done, "kept by s.once, changes in each step and is not tracked")


def test_what_once_keeps_from_after_track_on_is_told(run: Program) -> None:
    """The first look, in `s.track`, did not find it yet."""
    body = _body("collections.deque", "len(kept)", "kept.append((x, y))")
    made = "kept = s.once(collections.deque)\n"
    body = body.replace(made, "").replace("net =", f"{made}net =")
    warned(run(body, PARTS), "deque, kept by s.once, changes in each step and is not tracked")


def test_a_second_model_that_once_keeps_is_told(run: Program) -> None:
    """A model of rewards with an optimizer of its own: neither was tracked."""
    body = USUAL.replace("s.track", "rewards, other = s.once(build, 1)\ns.track")
    learns = "nn.functional.mse_loss(rewards(x), y).backward()\n    average(rewards, s.world)"
    body = body.replace("    with", f"    {learns}\n    with")
    parts = """
    def build(number=0):
        torch.manual_seed(number)
        model = nn.Linear(8, 1)
        return model, torch.optim.SGD(model.parameters(), 0.01)
    """
    done = run(body + "        other.step()\n        other.zero_grad()\n", parts)
    warned(done, "Linear.weight, kept by s.once, changes in each step and is not tracked")


def test_a_loss_whose_parameters_a_tracked_optimizer_trains_is_told_nothing(run: Program) -> None:
    parts = """
    def build():
        torch.manual_seed(0)
        model, weigh = nn.Linear(8, 1), nn.Linear(1, 1)
        every = [*model.parameters(), *weigh.parameters()]
        return model, weigh, torch.optim.SGD(every, 0.01)
    """
    body = USUAL.replace("model, opt = s", "model, weigh, opt = s")
    body = body.replace("net(x)", "weigh(net(x))")
    told_nothing(run(body.replace("    with", "    average(weigh, s.world)\n    with"), parts))


def test_what_once_keeps_and_is_tracked_is_told_nothing(run: Program) -> None:
    body = _body(*KEPT["a curriculum"][:3])
    told_nothing(run(body.replace("opt=opt)", "opt=opt, kept=kept)"), PARTS))


@pytest.mark.parametrize(
    ("made", "changed"),
    [
        ("list", "kept.append(float(x.mean()))"),
        ("dict", "kept[s.rank] = (1, 'a word')"),
        ("Samples", "kept.read += 1"),
        ("Stream", "kept.read += 1"),
        ("Last", "kept.batch, kept.loss = x.detach(), float(x.mean())"),
        ("collections.Counter", "kept['steps'] += 1"),
    ],
    ids=["a list of losses", "a dict of words", "a dataset", "a stream", "the last", "counts"],
)
def test_what_once_keeps_and_is_no_state_is_told_nothing(
    run: Program, made: str, changed: str
) -> None:
    parts = (
        PARTS
        + """
class Samples(torch.utils.data.Dataset):
    read = 0

class Stream:
    read = 0
    def __iter__(self):
        return iter(())

class Last:
    batch = loss = None
"""
    )
    told_nothing(run(_body(made, "1", changed), parts))


TRACKED = """
def lists():
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    return model, [p.detach().clone() for p in model.parameters()]

def averaged():
    model, averages = lists()
    return model, averages, torch.optim.SGD(model.parameters(), 0.01)

def in_full_precision():
    model, masters = lists()
    for one in masters:
        one.requires_grad_()
    return model.bfloat16(), masters, torch.optim.SGD(masters, 0.01)

class Masters(torch.optim.SGD):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.masters = [p.detach().clone() for p in self.param_groups[0]["params"]]

    def state_dict(self):
        return super().state_dict() | {"masters": self.masters}

    def load_state_dict(self, state):
        masters = state.pop("masters")
        torch._foreach_copy_(self.masters, masters)
        super().load_state_dict(state)

def in_an_optimizer():
    model, _ = lists()
    opt = Masters(model.parameters(), 0.01)
    return model, opt.masters, opt
"""
LIST = """
model, kept, opt = s.once({made})
s.track(model=model, opt=opt{tracked})
net = s.ddp(model)
for x, y in s.loader(DATA, global_batch=8, steps=6, epochs=None):
    nn.functional.mse_loss(net(x.to(model.weight.dtype)).float(), y).backward()
    with s.update():
        for p, k in zip(model.parameters(), kept):
            k.grad = p.grad.to(k.dtype) if k.requires_grad else None
        opt.step()
        with torch.no_grad():
            for p, k in zip(model.parameters(), kept):
                p.copy_(k) if k.requires_grad else k.lerp_(p, 0.1)
        model.zero_grad()
"""


@pytest.mark.parametrize(
    ("made", "tracked"),
    [
        ("averaged", ", **{f'average{n}': one for n, one in enumerate(kept)}"),
        ("in_full_precision", ""),
        ("in_an_optimizer", ""),
    ],
)
def test_a_list_of_tensors_that_are_tracked_is_told_nothing(
    run: Program, made: str, tracked: str
) -> None:
    """Each was named as a list that changes, and as averages that nothing tracks."""
    told_nothing(run(LIST.format(made=made, tracked=tracked), TRACKED))


FLAT = "nn.utils.parameters_to_vector(model.parameters()).detach()"
AVERAGES = {
    "arrays": (
        "[p.detach().numpy().copy() for p in model.parameters()]",
        "for a, p in zip(kept, model.parameters()): a += 0.1 * (p.detach().numpy() - a)",
    ),
    "one vector": (f"{FLAT}.clone()", f"kept.lerp_({FLAT}, 0.001)"),
    "made anew": (
        "{n: p.detach().clone() for n, p in model.state_dict().items()}",
        "kept = {n: kept[n] + (p - kept[n]) / (s.step + 2) for n, p in model.state_dict().items()}",
    ),
    "of one parameter": (
        "model.weight.detach().clone()",
        "kept = 0.9 * kept + 0.1 * model.weight.detach()",
    ),
    "before the step": (f"{FLAT}.double()", f"kept.lerp_({FLAT}.double(), 0.1); opt.step()"),
}
"""The ways in which averages are made, and updated."""


@pytest.mark.parametrize("kind", AVERAGES)
def test_averages_in_a_variable_are_told(run: Program, kind: str) -> None:
    """They began anew after a fault, without a word."""
    made, use = AVERAGES[kind]
    body = USUAL.replace("net = s", f"kept = {made}\nnet = s")
    steps = use if "opt.step()" in use else f"opt.step()\n        {use}"
    done = run(body.replace("        opt.step()", f"        {steps}"))
    words = "averages of the weights (kept) are not tracked"
    if kind == "made anew":  # it is seen before its first update, as any copy in all shapes
        words = "a copy of the weights (dict) is made in the training function"
    warned(done, words)


IN_AN_OBJECT = "trainer = Trainer(); trainer.kept = s.once(Average, model)"
EMA = """
class Average:
    def __init__(self, model):
        self.model = model
        self.shadow = {n: p.data.clone() for n, p in model.named_parameters()}

    def update(self):
        for name, p in self.model.named_parameters():
            self.shadow[name] = (0.1 * p.data + 0.9 * self.shadow[name]).clone()

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow = state["shadow"]

class Trainer:
    pass
"""


@pytest.mark.parametrize(
    "kept",
    ["kept = s.once(Average, model)", "global kept; kept = Average(model)", IN_AN_OBJECT],
    ids=["by s.once", "in a global variable", "in an object"],
)
def test_averages_that_an_object_makes_anew_in_each_step_are_told(run: Program, kept: str) -> None:
    """As most programs write them. A replaced rank began with other ones, without a word."""
    body = USUAL.replace("net = s.ddp", f"{kept}\nnet = s.ddp")
    name = "trainer.kept" if "Trainer" in kept else "kept"
    body = body.replace("opt.step()", f"opt.step()\n        {name}.update()")
    done = run(body, EMA)
    assert done.returncode == 0, done.stderr[-4000:]
    told = f"averages of the weights ({name}.shadow) are not tracked"
    assert done.stderr.count(told) == 1 or "a copy of the weights (dict) is made" in done.stderr


def test_averages_of_a_tracked_object_are_told_nothing(run: Program) -> None:
    body = USUAL.replace("s.track(", "kept = s.once(Average, model)\ns.track(kept=kept, ")
    told_nothing(run(body.replace("opt.step()", "opt.step()\n        kept.update()"), EMA))


def test_averages_that_are_kept_are_told_once(run: Program) -> None:
    made, use = AVERAGES["one vector"]
    body = USUAL.replace("s.track", f"kept = s.once(lambda: {made})\ns.track")
    done = run(body.replace("opt.step()", f"opt.step()\n        {use}"))
    warned(done, "kept by s.once, changes in each step")
    assert "averages of the weights" not in done.stderr
    tracked = body.replace("opt=opt)", "opt=opt, kept=kept)")
    told_nothing(run(tracked.replace("opt.step()", f"opt.step()\n        {use}")))


@pytest.mark.parametrize(
    "use",
    [
        f"kept = {FLAT}.clone()",
        f"kept = {FLAT}.half()",
        f"kept = {FLAT} + 0.01 * torch.randn(9)",
        f"kept = {FLAT} - 0.9 * kept",
        "kept = torch.cat([p.grad.flatten() for p in model.parameters()])",
        "kept = 0.9 * kept + 0.1e-6 * torch.cat([p.grad.flatten() for p in model.parameters()])**2",
        "kept = list(model.parameters())",
    ],
    ids=["before", "halves", "with noise", "a difference", "gradients", "squares", "themselves"],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_no_average_is_told_nothing(run: Program, use: str, when: str) -> None:
    body = USUAL.replace("net = s", f"kept = {FLAT}.clone() * 0\nnet = s")
    steps = f"{use}\n        opt.step()" if when == "before" else f"opt.step()\n        {use}"
    told_nothing(run(body.replace("opt.step()", steps)))


HOOK = """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    class Errors:
        def __init__(self):
            self.steps = 0

    OURS = Errors()

    def summed(state, bucket):
        if isinstance(state, Errors):
            state.steps += 1
        return default_hooks.allreduce_hook(None, bucket)

    def power():
        return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
"""


@pytest.mark.parametrize(
    ("made", "hook", "kind"),
    [
        ("s.once(power)", "powerSGD_hook.powerSGD_hook", "PowerSGDState"),
        ("s.once(Errors)", "summed", "Errors"),
        ("OURS", "summed", "Errors"),
        ("Errors()", "summed", ""),
        ("object()", "summed", ""),
        ("None", "default_hooks.fp16_compress_hook", ""),
    ],
    ids=["of torch", "own", "global", "anew", "constant", "none"],
)
def test_a_hook_for_gradients_that_keeps_state_is_told(
    run: Program, made: str, hook: str, kind: str
) -> None:
    """A replaced rank exchanged whole gradients where the others exchanged parts of them."""
    body = USUAL.replace(
        "net = s.ddp(model)", f"net = s.ddp(model)\nnet.register_comm_hook({made}, {hook})"
    )
    done = run(body, HOOK)
    if kind:
        words = f"{kind}, the state of DDP's hook for gradients, changes in each step, outlives"
        assert len([line for line in done.stderr.splitlines() if words in line]) == 1, done.stderr
    else:
        told_nothing(done)


def test_a_hook_for_gradients_that_begins_anew_after_a_fault_is_told(run: Program) -> None:
    hooked = "net = s.ddp(model)\nnet.register_comm_hook(Errors(), summed)"
    body = USUAL.replace("net = s.ddp(model)", hooked)
    done = run(body, HOOK, inject="exception:rank=1,step=1")
    warned(done, "Errors, the state of DDP's hook for gradients, was made anew after a fault")
