"""Sees that training stands still, and says whose fault it is; sees who is slow.

`Watch` is the public door; nothing here loads torch.
"""

from slurm_resilience.training.watch.hang import HangVerdict, RankSign
from slurm_resilience.training.watch.listen import listen
from slurm_resilience.training.watch.straggler import Straggler
from slurm_resilience.training.watch.watch import Watch

__all__ = ["HangVerdict", "RankSign", "Straggler", "Watch", "listen"]
