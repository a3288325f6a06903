#!/bin/sh
# Without munge neither slurmd nor sresd can speak to its controller. A wrong clock shows here too.
set -eu
if ! munge -n | unmunge >/dev/null; then
    echo "munge does not vouch for this node: is munged running, with the cluster's key?" >&2
    exit 1
fi
echo "munge works"
