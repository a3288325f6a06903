"""Faults for drills, brought about on the way that a real one takes."""
