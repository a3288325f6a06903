"""Programs that load a node or its links through torch; each is a process of its own."""
