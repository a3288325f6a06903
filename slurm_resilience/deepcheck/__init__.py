"""Deep checks: load nodes and the links between them, as Slurm jobs, and judge what they do."""
