"""See that training stands still and whose fault it is, and which rank is slow.

`Watch` is the public door; nothing here loads torch.
"""

from slurm_resilience.resume.progress.straggler import Straggler
from slurm_resilience.training.watch.hang import HangVerdict, RankSign
from slurm_resilience.training.watch.listen import listen
from slurm_resilience.training.watch.watch import Watch

__all__ = ["HangVerdict", "RankSign", "Straggler", "Watch", "listen"]
