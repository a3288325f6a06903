"""slurm-resilience: keeps large training runs alive on stock Slurm."""

__version__ = "0.1.0"
