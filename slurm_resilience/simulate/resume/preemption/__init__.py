"""The preemption of a simulated job: what is drawn for it, and what Slurm does."""
