"""Programs that take their gradients by `torch.func`: their tensors have no memory of their own."""

from __future__ import annotations

import pytest
from naive import WEIGHTS, Program

pytestmark = pytest.mark.training
pytest.importorskip("torch", reason="torch is not installed")

FUNCTIONAL = (
    """
model, opt = s.once(build)
s.track(model=model, opt=opt)
keep = []

def loss(parameters, x, y):
    keep.append(parameters)
    return nn.functional.mse_loss(torch.func.functional_call(model, parameters, (x,)), y)

for x, y in s.loader(DATA, global_batch=8, steps=6, epochs=None):
    if s.rank == 0 and s.step == 3 and not FAILED:
        FAILED.append(True)
        raise RuntimeError("an error of the program's own")
    gradients = torch.func.grad(loss)(dict(model.named_parameters()), x, y)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].detach()
    average(model, s.world)
    with s.update():
        opt.step()
"""
    + WEIGHTS
)


@pytest.mark.parametrize("inject", ["", "kill:rank=1,step=4,phase=update"], ids=["", "a drill"])
def test_gradients_of_functions_outlive_a_fault(run: Program, inject: str) -> None:
    """The training ended: the look for copies asked a tensor for memory that it had not got, and
    a drill's own hook was an error inside of the function."""
    ends = []
    for parts in ("FAILED = [True]", "FAILED = []"):
        done = run(FUNCTIONAL, parts, inject=inject if parts.endswith("[]") else "")
        assert done.returncode == 0, done.stderr[-4000:]
        ends.append({line for line in done.stdout.splitlines() if line.startswith("weights")})
    assert ends[0] == ends[1] and len(ends[0]) == 1
