"""Errors of GPUs that the NVIDIA driver tells by events."""
