"""The processes of a node: ranks, standbys and the reaper, how they start and how they end."""
