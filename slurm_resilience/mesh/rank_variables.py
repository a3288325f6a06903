"""Variables and files by which a rank is told of its part, and how its job changes. Pure."""

OF_A_RANK = (
    "SRES_INCARNATION",
    "SRES_SEAT",
    "SRES_SEATS",
    "SRES_SEATS_HERE",
    "SRES_MEET",
    "SRES_SECRET",
    "SRES_NODE",
    "SRES_MIN_WORLD",
    "SRES_KEEPER",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
)
"""Variables that tell a process which rank it is, where a join step or a launcher started it; it
has the first of them then. `spank/common.c` has them, too."""

RANK_STEP = "SRES_RANK_STEP"
"""JOB.STEP PLACE: the step that a rank is in, and where it meets the others. It notes that itself,
for a program that it starts by srun, and that would else take its seat."""
ELASTIC_NODES = "SRES_NODES"
"""MIN:MAX nodes. It comes before a launcher's --nnodes: scripts write the number of nodes there
that the job has at its start."""
NAMED_SIZES = "SRES_SIZES"
"""Numbers of nodes that a world may have, such as 2,4,8; not set: any between MIN and MAX."""
CHECKPOINTLESS = "SRES_CHECKPOINTLESS"
"""1: the program uses `slurm_resilience.training`; 0: stop it and start it again all the same."""
LENT = "SRES_LENT"
"""1: this node is a companion's, and SIGTERM asks its ranks to leave."""
HOLD_PREFIX = "hold-"
"""Beginning of the name of a file that a launcher waits for before it meets the others."""
