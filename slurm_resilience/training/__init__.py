"""Checkpointless training with plain PyTorch: recover in the process, heal from a peer.

from slurm_resilience.training import Session, resilient

@resilient(min_world=2)
def train(s: Session) -> None:
    model, opt = s.once(build)
    s.track(model=model, opt=opt)
    net = s.ddp(model)
    for batch in s.loader(dataset, global_batch=1024):
        loss(net, batch).backward()
        with s.update():
            opt.step()
            opt.zero_grad()
"""

from slurm_resilience.training import inject
from slurm_resilience.training.block import resilient
from slurm_resilience.training.checkpoint import Checkpointer
from slurm_resilience.training.data import ReplayLoader
from slurm_resilience.training.session import Session
from slurm_resilience.training.watch import Watch

__all__ = ["Checkpointer", "ReplayLoader", "Session", "Watch", "inject", "resilient"]
