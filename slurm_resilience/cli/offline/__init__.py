"""Commands that need neither Slurm nor a daemon, only a file."""
