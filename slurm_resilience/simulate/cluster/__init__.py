"""A simulated cluster around the real sresctld: Slurm, nodes, programs and people."""
