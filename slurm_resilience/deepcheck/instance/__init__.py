"""Checks of one node, which run in a step on it."""
