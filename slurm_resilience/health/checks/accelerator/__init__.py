"""Checks of accelerators besides GPUs."""
