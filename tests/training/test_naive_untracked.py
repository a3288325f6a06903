"""Programs that keep state which nothing tracks: it is healed all the same, or told of within two
steps, without waiting for a fault."""

from __future__ import annotations

from textwrap import dedent

import pytest
from naive import USUAL, WEIGHTS, Program, told_nothing, warned

pytestmark = pytest.mark.training
pytest.importorskip("torch", reason="torch is not installed")


COUNTING = """
class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.cached = nn.Linear(8, 1), torch.zeros(1)
        {made}

    def forward(self, x):
        {counts}
        self.cached = x.detach().mean(0)
        return self.line(x) * {used}

def build():
    torch.manual_seed(0)
    model = Counting()
    return model, torch.optim.SGD(model.parameters(), 0.01)
"""


@pytest.mark.parametrize(
    ("made", "counts", "used", "told"),
    [
        ("self.warm = 0", "self.warm += 1", "(1 + self.warm)", "model.warm counts in each step"),
        ("self.mean = torch.ones(1)", "self.mean.mul_(0.9)", "self.mean", "model.mean counts in"),
        ("self.register_buffer('warm', torch.zeros(()))", "self.warm += 1", "(1 + self.warm)", ""),
    ],
    ids=["a number", "a tensor", "a buffer"],
)
def test_state_in_a_modules_attributes_is_told(
    run: Program, made: str, counts: str, used: str, told: str
) -> None:
    """A repeated step counted twice, and a replaced rank computed with another number."""
    done = run(USUAL, COUNTING.format(made=made, counts=counts, used=used))
    if told:
        warned(done, told)
        warned(done, "harmless where only a log reads it")
    else:
        told_nothing(done)


COUNTED = """
model, opt = s.once(build)
s.track(model=model, opt=opt)
net, n, tau = s.ddp(model), 0, 1.0
for x, y in s.loader(DATA, global_batch=8, steps=5, epochs=None):
    n += 1
    (nn.functional.mse_loss(net(x), y) * {}).backward()
    with s.update():
        opt.step()
        opt.zero_grad()
"""


@pytest.mark.parametrize(
    ("weight", "more", "told"),
    [
        ("0.9 ** n", "", "n counts in each step, and something is computed from it"),
        ("min(1.0, n / 10)", "", "n counts in each step"),
        ("tau", "tau *= 0.9", "tau counts in each step"),
        ("0.9 ** n", "s.step", ""),
        ("1", "n % 2 or say(n, f'{n}', 1.0 / n, n // 2, n > 3)", ""),
    ],
    ids=["a power", "a part", "a fraction", "where the step is known", "a log"],
)
def test_a_local_variable_that_counts_is_told(
    run: Program, weight: str, more: str, told: str
) -> None:
    """It began anew after a fault, on all ranks alike: no comparison told."""
    done = run(COUNTED.format(weight) + f"        {more}\n")
    if told:
        warned(done, told)
    else:
        told_nothing(done)


OF_OBJECTS = """
class Trainer:
    def __init__(self):
        self.step = 0

    def weight(self):
        return min(1.0, self.step / 10)

    def after(self):
        self.step += 1

class Decays:
    def __init__(self):
        self.tau = 1.0

    def weight(self):
        return self.tau

    def after(self):
        self.tau = self.tau * 0.9

class Logs(Decays):
    def __init__(self):
        self.tau, self.step, self.seen, self.loss = 1.0, 0, 0, 0.0

    def after(self):
        self.step += 1
        self.seen += 4
        self.loss += 0.5 ** (self.seen % 3)
        say(self.step, self.loss / self.seen, self.step // 3, self.step > 3)
"""


@pytest.mark.parametrize("made", ["{}()", "WHOLE"], ids=["of the function", "global"])
@pytest.mark.parametrize(
    ("kind", "told"),
    [("Trainer", "trainer.step counts in"), ("Decays", "trainer.tau counts in"), ("Logs", "")],
)
def test_an_attribute_that_counts_is_told(run: Program, kind: str, told: str, made: str) -> None:
    """A replaced rank began with the weight of the first step, and the others did not."""
    body = COUNTED.format("trainer.weight()").replace("n += 1", "pass")
    body = body.replace("net, n", f"trainer = {made.format(kind)}\nnet, n")
    done = run(body + "    trainer.after()\n", OF_OBJECTS + f"WHOLE = {kind}()\n")
    if told:
        warned(done, told)
    else:
        told_nothing(done)


ANEW = """
model = nn.Linear(8, 1)
opt = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
average = torch.optim.swa_utils.AveragedModel(model)
s.track(model=model, opt=opt, average=average)
net = s.ddp(model)
for x, y in s.loader(DATA, global_batch=8, steps=8, epochs=None):
    nn.functional.mse_loss(net(x), y).backward()
    with s.update():
        opt.step()
        opt.zero_grad()
        average.update_parameters(model)
"""


def test_a_model_of_the_world_before_is_no_copy(run: Program) -> None:
    """All is made whenever the function is called, and what was tracked lives on for a while."""
    done = run(ANEW, inject="exception:rank=1,step=5")
    assert "a copy of the weights" not in done.stderr, done.stderr[-4000:]
    assert done.stdout.count("ends at 8") == 2, done.stdout


def test_a_look_at_the_programs_code_that_fails_ends_no_training(run: Program) -> None:
    """A Python that is not known yet may have other instructions."""
    parts = (
        "from slurm_resilience.training.guards.code import local_counts\n"
        "def fails(*_): raise IndexError\n"
        "local_counts.uses = fails"
    )
    told_nothing(run(COUNTED.format("0.9 ** n"), parts))


def test_a_look_at_the_programs_objects_that_fails_ends_no_training(run: Program) -> None:
    """A tensor may be of a kind that is not known yet."""
    parts = (
        "from slurm_resilience.training.guards import kept_copies, kept_generators\n"
        "def fails(*_): raise RuntimeError\n"
        "kept_copies._copies = kept_generators._state = fails\n"
        "noise = torch.Generator()"
    )
    told_nothing(run(USUAL, parts))


def test_buffers_of_a_loss_that_is_not_tracked_are_told(run: Program) -> None:
    """A running centre was changed twice by a step that was repeated, and was not healed."""
    parts = """
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("centre", torch.zeros(1))

        def forward(self, y):
            self.centre = self.centre * 0.9 + y.detach().mean() * 0.1
            return (y - self.centre).square().mean()
    """
    body = USUAL.replace("s.track", "loss = s.once(Centred)\ns.track")
    body = body.replace("nn.functional.mse_loss(net(x), y)", "loss(net(x))")
    warned(run(body, parts), "Centred.centre changes in each step, and its module is not tracked")


GENERATORS = {
    "torch": ("torch.Generator().manual_seed(0)", "torch.randn(x.shape, generator=noise)"),
    "numpy": (
        "__import__('numpy').random.default_rng(0)",
        "torch.from_numpy(noise.standard_normal(tuple(x.shape))).float()",
    ),
    "old numpy": (
        "__import__('numpy').random.RandomState(0)",
        "torch.from_numpy(noise.standard_normal(tuple(x.shape))).float()",
    ),
    "python": ("__import__('random').Random(0)", "noise.random()"),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_of_the_programs_own_is_healed(run: Program, kind: str) -> None:
    """It could not be tracked. A repeated step drew other numbers, and a replaced rank the first
    ones again."""
    made, draw = GENERATORS[kind]
    body = USUAL.replace("s.track(", f"noise = s.once(lambda: {made})\ns.track(noise=noise, ")
    body = body.replace("net(x)", f"net(x + 0.1 * {draw})").replace("steps=4", "steps=8") + WEIGHTS
    ends = []
    for fault in ("", "kill:rank=1,step=3,phase=update", "exception:rank=1,step=5,phase=backward"):
        done = run(body, inject=fault)
        assert done.returncode == 0, done.stderr[-4000:]
        assert "changed between" not in done.stderr and "drawn from" not in done.stderr
        ends.append({line for line in done.stdout.splitlines() if line.startswith("weights")})
    assert ends[0] == ends[1] == ends[2] and len(ends[0]) == 1


@pytest.mark.parametrize("kind", ["torch", "numpy", "old numpy"])
def test_a_generator_that_is_not_tracked_is_told(run: Program, kind: str) -> None:
    made, draw = GENERATORS[kind]
    body = USUAL.replace("s.track(", f"noise = s.once(lambda: {made})\ns.track(")
    warned(run(body.replace("net(x)", f"net(x + 0.1 * {draw})")), "is drawn from and not tracked")


@pytest.mark.parametrize("seeded", ["once", "in each step"])
def test_a_generator_in_a_local_variable_is_told(run: Program, seeded: str) -> None:
    """It lies in no list of Python's memory, and was not found. One that is seeded by the step
    draws the same in a step that is repeated."""
    made, draw = GENERATORS["torch"]
    body = USUAL.replace("net =", f"noise = {made}\nnet =")
    body = body.replace("net(x)", f"net(x + 0.1 * {draw})")
    if seeded == "once":
        warned(run(body), "is drawn from and not tracked")
    else:
        told_nothing(run(body.replace("    nn.", "    noise.manual_seed(s.step)\n    nn.", 1)))


def test_the_generator_of_a_communication_hook_is_told_nothing(run: Program) -> None:
    """Its state is made anew beside each wrapper, with the same seed on all ranks."""
    parts = """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 1))
        return model, torch.optim.SGD(model.parameters(), 0.01)
    """
    state = "power.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=1)"
    hooked = f"net = s.ddp(model)\nnet.register_comm_hook({state}, power.powerSGD_hook)"
    told_nothing(run(USUAL.replace("net = s.ddp(model)", hooked), parts))


def test_an_optimizer_that_is_not_tracked_is_told(run: Program) -> None:
    warned(
        run(USUAL.replace(", opt=opt)", ")")), "trained by an optimizer that is not tracked (SGD)"
    )


@pytest.mark.parametrize(
    ("what", "use", "words"),
    [
        ("torch.optim.lr_scheduler.StepLR, opt, 2", "part.step()", "StepLR"),
        ("torch.optim.lr_scheduler.ReduceLROnPlateau, opt", "part.step(1.0)", "ReduceLROnPlateau"),
        ("torch.optim.swa_utils.AveragedModel, model", "part.update_parameters(model)", "Averaged"),
        ("torch.amp.GradScaler, 'cpu'", "part.scale(x)", "GradScaler"),
    ],
    ids=["schedule", "plateau", "average", "scaler"],
)
@pytest.mark.parametrize("tracked", [False, True])
def test_what_goes_with_an_optimizer_and_is_not_tracked_is_told(
    run: Program, what: str, use: str, words: str, tracked: bool
) -> None:
    """It was told of one step after a rank had been replaced, which had begun with a new one."""
    body = USUAL.replace("s.track", f"part = s.once({what})\ns.track") + f"        {use}\n"
    if tracked:
        told_nothing(run(body.replace("opt=opt)", "opt=opt, part=part)")))
    else:
        done = run(body)
        warned(done, f"{words}")
        warned(done, "belongs to the training and is not tracked")


COPIES = {
    "list": ("[p.detach().clone() for p in model.parameters()]", "average"),
    "dict": ("{k: v.clone() for k, v in model.state_dict().items()}", "average.values()"),
    "module": ("__import__('copy').deepcopy(model)", "average.parameters()"),
}


WRITES = [
    "lerp_(now, 0.1)",
    "data.mul_(0.9).add_(now.data, alpha=0.1)",
    "data = one.data.lerp(now, 0.1)",
]


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("write", WRITES)
def test_averages_in_a_copy_that_is_not_tracked_are_told(
    run: Program, kind: str, write: str
) -> None:
    """They were not healed, and a replaced rank began with new ones without a word. torch counts no
    write through `.data`."""
    made, values = COPIES[kind]
    body = USUAL.replace("s.track", f"average = s.once(lambda: {made})\ns.track")
    body += "        with torch.no_grad():\n"
    body += f"            for one, now in zip({values}, model.parameters()):\n"
    body += f"                one.{write}\n"
    done = run(body)
    warned(done, "the parameters' shapes and nearly their values is written to and not tracked")
    assert "kept by s.once" not in done.stderr, "one cause, one line"


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("once", [False, True])
def test_a_copy_that_the_function_makes_of_the_weights_is_told(
    run: Program, kind: str, once: bool
) -> None:
    """A reference was made anew after a fault, of weights that had been trained meanwhile."""
    made = f"s.once(lambda: {COPIES[kind][0]})" if once else COPIES[kind][0]
    body = USUAL.replace("net =", f"average = {made}\nnet =")
    warned(run(body), "a copy of the weights")


def test_a_loss_beside_a_module_of_one_parameter_is_told_nothing(run: Program) -> None:
    """A weight of the loss that is learnt, of one number: the loss, another one, moved towards it
    for some steps, and was told of as an average of it."""
    parts = """
    class Weighed(nn.Module):
        def __init__(self):
            super().__init__()
            self.logarithm = nn.Parameter(torch.full((1,), -9.0))

        def forward(self, out, y):
            return (out - y).square().mean() * torch.exp(self.logarithm).clamp(1) + self.logarithm

    def build():
        torch.manual_seed(0)
        model, weighed = nn.Linear(8, 1), Weighed()
        every = [*model.parameters(), *weighed.parameters()]
        return model, weighed, torch.optim.SGD(every, 0.01)
    """
    body = USUAL.replace("model, opt = s", "model, weighed, opt = s")
    body = body.replace("s.track(", "s.track(weighed=weighed, ")
    body = body.replace(
        "nn.functional.mse_loss(net(x), y)",
        "loss = weighed(net(X), X.sum(1, keepdim=True))\n    loss",
    )
    told_nothing(run(body.replace("    with", "    average(weighed, s.world)\n    with"), parts))


IN_ONE_LINE = {
    "a list": (COPIES["list"][0], "torch._foreach_lerp_(average, list(model.parameters()), 0.1)"),
    "a list made anew": (
        COPIES["list"][0],
        "average = [a.lerp(p, 0.1) for a, p in zip(average, model.parameters())]",
    ),
    "a reference that follows": (
        COPIES["module"][0],
        "average.load_state_dict(model.state_dict())",
    ),
    "torch's averages": (
        "torch.optim.swa_utils.AveragedModel(model)",
        "average.update_parameters(model)",
    ),
    "torch's averages, tracked": (
        "torch.optim.swa_utils.AveragedModel(model)",
        "average.update_parameters(model)",
    ),
}


@pytest.mark.parametrize("kind", IN_ONE_LINE)
def test_averages_that_change_outside_of_the_update_are_told_in_one_line(
    run: Program, kind: str
) -> None:
    """Two guards told of the same averages, in other words."""
    made, update = IN_ONE_LINE[kind]
    body = USUAL.replace("net =", f"average = {made}\nnet =")
    if kind.endswith("tracked"):
        body = body.replace(f"average = {made}\n", "")
        body = body.replace(
            "s.track(", f"average = s.once(lambda: {made})\ns.track(average=average, "
        )
    done = run(body + f"    with torch.no_grad(): {update}\n")
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stderr.splitlines() if "sres" in line]
    assert len(lines) == 2, done.stderr[-4000:]


def test_a_copy_that_is_made_before_track_in_the_function_is_told_after_a_fault(
    run: Program,
) -> None:
    body = USUAL.replace("s.track", f"average = {COPIES['module'][0]}\ns.track")
    warned(run(body, inject="exception:rank=0,step=2,phase=backward"), "a copy of the weights")


def test_a_copy_that_is_made_where_the_model_is_built_is_not_told(run: Program) -> None:
    body = USUAL.replace("s.track", f"average = s.once(lambda: {COPIES['module'][0]})\ns.track")
    told_nothing(run(body))
    done = run(body, inject="exception:rank=0,step=2,phase=backward")
    assert done.returncode == 0 and "a copy of the weights" not in done.stderr, done.stderr


def test_what_was_built_before_the_call_and_is_not_tracked_is_told(run: Program) -> None:
    """Python's collector did not list it, and so it was not looked at."""
    parts = """
    MODEL, OPT = build()
    SCHEDULE = torch.optim.lr_scheduler.StepLR(OPT, 2)
    AVERAGE = __import__("copy").deepcopy(MODEL)
    """
    body = (
        USUAL.replace("s.once(build)", "MODEL, OPT")
        + """\
        SCHEDULE.step()
        with torch.no_grad():
            for one, now in zip(AVERAGE.parameters(), model.parameters()):
                one.lerp_(now, 0.1)
    """.replace("\n    ", "\n")
    )
    done = run(body, parts)
    warned(done, "StepLR belongs to the training and is not tracked")
    warned(done, "a Linear with the parameters' shapes and nearly their values is written to")


def test_copies_that_are_no_averages_are_not_told(run: Program) -> None:
    parts = """
    def more(model):
        begun = [p.detach().clone() for p in model.parameters()]
        return begun, [torch.zeros_like(p) for p in model.parameters()]
    """
    body = USUAL.replace("s.track", "begun, sums = s.once(more, model)\ns.track")
    body = body.replace(
        "    with s.update",
        "    for a, p in zip(sums, model.parameters()): a.add_(p.grad)\n    with s.update",
    )
    told_nothing(run(body + "        [one.zero_() for one in sums]\n", parts))


def test_a_schedule_made_of_several_is_tracked_as_a_whole(run: Program) -> None:
    parts = """
    def build_all():
        model, opt = build()
        rates = torch.optim.lr_scheduler
        two = [rates.ConstantLR(opt), rates.StepLR(opt, 2)]
        return model, opt, rates.SequentialLR(opt, two, [2])
    """
    body = USUAL.replace("model, opt = s.once(build)", "model, opt, part = s.once(build_all)")
    told_nothing(
        run(body.replace("opt=opt)", "opt=opt, part=part)") + "        part.step()\n", parts)
    )


def test_a_compiled_step_of_a_tracked_optimizer_is_told_nothing(run: Program) -> None:
    """The module that the compiler makes of it has the optimizer's own tensors as buffers."""
    body = USUAL.replace("net = s", "step = torch.compile(opt.step, backend='eager')\nnet = s")
    parts = """
    def build():
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        return model, torch.optim.AdamW(model.parameters(), 0.01)
    """
    told_nothing(run(body.replace("opt.step()\n", "step()\n"), parts))


def test_an_optimizer_of_what_is_not_tracked_is_told_nothing(run: Program) -> None:
    """A critic that is thrown away, say."""
    other = """
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
"""
    body = USUAL.replace("net = s.ddp(model)", "net = s.ddp(model)" + dedent(other).rstrip())
    told_nothing(run(body + "    other.step()\n"))


def test_parameters_that_the_optimizer_gets_later_are_told(run: Program) -> None:
    """A replaced rank is built without them: its state would not fit at the first fault."""
    more = "if s.step == 2:\n        opt.add_param_group({'params': [torch.zeros(1)]})"
    warned(run(USUAL + f"    {more}\n"), "opt was given parameters after s.track")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("model.extra = nn.Parameter(torch.zeros(1))", "model.extra came after s.track"),
        ("model.part = nn.Linear(2, 2)", "model.part.weight, model.part.bias came after s.track"),
    ],
)
def test_parameters_that_the_model_gets_later_are_told(run: Program, more: str, words: str) -> None:
    """The training ended at the first fault, with nothing said before."""
    warned(run(USUAL + f"    if s.step == 2:\n        {more}\n"), words)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("model.twin.weight = model.weight", "model.twin.weight went after s.track, or shares"),
        ("model.twin = nn.Identity()", "model.twin.weight went after s.track, or shares"),
        ("del opt.param_groups[1]", "opt lost groups of parameters after s.track"),
    ],
    ids=["tied", "left out", "a group"],
)
def test_parameters_that_go_are_told(run: Program, more: str, words: str) -> None:
    """The training ended at the first fault, with nothing said before; of a group it was said that
    it had come."""
    parts = """
    def build():
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        model.twin = nn.Linear(8, 1, bias=False).requires_grad_(False)
        groups = [{"params": list(model.parameters())[:2]}, {"params": [model.twin.weight]}]
        return model, torch.optim.SGD(groups, 0.01)
    """
    done = run(USUAL + f"    if s.step == 2:\n        {more}\n", parts)
    warned(done, words)
    assert "came after" not in done.stderr and "was given" not in done.stderr


def test_a_parameter_in_the_place_of_another_is_told_nothing(run: Program) -> None:
    more = "if s.step == 2:\n        model.bias = nn.Parameter(model.bias.detach().clone())\n"
    more += "        net = s.ddp(model)\n        opt.param_groups[0]['params'][1] = model.bias"
    done = run(USUAL + f"    {more}\n")
    assert "came after" not in done.stderr
