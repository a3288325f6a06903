"""Orders of root and SlurmUser to sresctld."""
