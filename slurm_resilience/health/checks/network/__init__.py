"""Checks of network ports and adapters."""
