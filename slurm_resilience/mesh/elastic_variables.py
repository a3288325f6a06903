"""Variables by which the supervisor tells ranks that their job grows and shrinks. Pure."""

ELASTIC_NODES = "SRES_NODES"
"""MIN:MAX nodes. It comes before a launcher's --nnodes: scripts write the number of nodes there
that the job has at its start."""
LENT = "SRES_LENT"
"""1: this node is a companion's, and SIGTERM asks its ranks to leave."""
