"""A simulated job around the real supervisor of `srun --auto-resume=1`."""
