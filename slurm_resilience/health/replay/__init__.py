"""The classifier over a saved file: no daemon is needed."""
