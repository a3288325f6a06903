#!/bin/sh
# A replaced node must come back under the name it had: Slurm knows it by that name only.
set -eu
node=$1
short=$(hostname)
short=${short%%.*}
if [ "$short" != "$node" ]; then
    echo "this machine calls itself '$short', Slurm calls it '$node'; set the host name" >&2
    exit 1
fi
if ! getent hosts "$node" >/dev/null; then
    echo "'$node' does not resolve; add it to the site's host table or DNS" >&2
    exit 1
fi
echo "host name $node, resolves"
