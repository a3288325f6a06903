"""Checks of NVIDIA GPUs, by NVML."""
