"""Lifecycle scripts: what a fresh or replaced node runs before it joins.

Standard library only, but for `hyperpod`: it runs on nodes that have nothing else yet.
"""
