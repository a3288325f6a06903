"""``python -m slurm_resilience.lifecycle``."""

from slurm_resilience.lifecycle.main import main

main()
