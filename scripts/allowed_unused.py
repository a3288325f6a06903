"""Names that look unused to vulture (the gate "dead code" of scripts/test), each with its caller.

Nothing imports this file. Take a line out when its name goes; a test checks that each name exists.
"""

# ruff: noqa: B018, F821  # the bare names below are what vulture reads

# Python calls them when a name of a package is loaded late.
__getattr__

# click calls them.
_.list_commands
_.get_command
_.format_commands

# torch calls them: modules, and what a store and a storage must answer to.
_.forward
_.compare_set
_.has_extended_api
_.multi_get
_.multi_set
_.num_keys
_.set_timeout
_.storage_meta

# Users' training scripts read it (docs/training.md).
_.healing

# shlex reads it.
_.whitespace_split

# torch reads them.
_.grad
_.group_count

# Members of an enumeration, read by their value.
JOB
PROCID
LOCALID

# A socket kept open so that no other lab takes the same address.
_._reserved

# A field of the journal, read in SQL and shown by `sres node show --format json`.
ended_by

# Part of the lab's interface for drills and tests.
_.wait_states

# Shown by `sres node show`, which reads the fields of an incident by name.
run_started

# What Slurm says of a node or a job; a reader of a snapshot expects it there.
cpus_alloc
time_left
work_dir

# For the training's own log: the last comparison of replicas.
compared

# DDP reads it at each forward; its `no_sync` sets it as well.
_.require_backward_grad_sync

# Says to a reader of a plan that a route passes on what its source has just received itself.
relay

# asyncio calls these of a connection, by position.
_.connection_made
_.get_buffer
sizehint
_.buffer_updated
_.pause_writing
_.resume_writing
_.connection_lost
exc

# A campaign (simulate/campaign.py) reads these of its figures by their names.
controller_seed
controller_seconds
resume_seed
resume_seconds
speaker_seed
elastic_seed
speaker_seconds
elastic_seconds

# urllib calls it.
_.redirect_request

# Compared with the other fields, as a whole (training/compat.py, MeshPlace).
coordinate
