"""High availability: the journal of the active sresctld is shipped to that of the standby."""
