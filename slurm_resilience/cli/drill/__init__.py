"""Drills: open one on a node, and inject a fault."""
