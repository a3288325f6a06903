"""The launcher: one for each node, with torchrun's flags and without torch.

    python -m slurm_resilience.launcher [torchrun's flags] train.py args…

It starts the node's ranks and keeps their seats filled: a rank that dies is replaced at once by a
warm standby, and nothing that it started outlives it. It does not choose which ranks step together:
the ranks meet each other. The ranks of a program that does not use the library are started again
all together (group_restart), on all nodes (launcher_world), by forks of a warm interpreter.

main (the command) → flags, node_rank (pure) → rendezvous_directory → launch (the
node's life) → restart_policy (pure: the answer to an ended rank). bootstrap.py runs in each rank.
"""
