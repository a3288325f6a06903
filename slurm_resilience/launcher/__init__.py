"""The launcher: one for each node, with torchrun's flags and without torch.

    python -m slurm_resilience.launcher [torchrun's flags] train.py args…

It starts the node's ranks and keeps their seats filled: a rank that dies is replaced at once by a
warm standby, and nothing that it started outlives it. Who steps with whom is none of its business:
the ranks meet each other.

main (flags) → words, place (what they mean here; pure) → meeting (directory, secret) → launch (the
node's life) → verdict (what an ended rank means; pure). bootstrap.py is what runs in each rank.
"""
