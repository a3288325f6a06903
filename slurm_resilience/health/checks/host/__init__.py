"""Checks of the processors, the memory and the kernel."""
