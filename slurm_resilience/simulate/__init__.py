"""Simulations of the pure cores: seeded, on a simulated clock, checked after every event.

A run is a function of its seed, so a seed that fails can be replayed exactly.
"""
