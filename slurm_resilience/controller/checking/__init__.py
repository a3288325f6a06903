"""Have nodes checked when there is a reason to."""
