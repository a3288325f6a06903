#!/bin/bash
# The interactive form: four nodes, one supervised step, at your terminal.
#
#   scripts/templates/salloc.sh python3 train.py …
#
# Slurm never requeues an salloc job, so a node can be exchanged only where nodes have no GRES.
set -euo pipefail
exec salloc --nodes="${NODES:-4}" --exclusive --no-kill srun --auto-resume=1 "$@"
