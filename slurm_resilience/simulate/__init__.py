"""Simulations of trainings, of the whole sresctld and of the supervisor, checked after every event.

A run is a function of its seed, so a seed that fails can be replayed exactly.
"""
