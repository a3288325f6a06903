"""Judges of saved documents: what a tool printed, given as text."""
