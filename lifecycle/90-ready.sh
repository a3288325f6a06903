#!/bin/sh
# Last: leave a stamp, which shows when this machine was found fit to join.
set -eu
state=${SRES_NODE_STATE:-/run/sres-node}
mkdir -p "$state"
date -u +%Y-%m-%dT%H:%M:%SZ >"$state/provisioned.new"
mv "$state/provisioned.new" "$state/provisioned"
echo "$1 is provisioned"
