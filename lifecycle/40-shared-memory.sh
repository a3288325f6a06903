#!/bin/sh
# Data loaders and NCCL's intra-node transport live in /dev/shm; a tiny one fails hours later.
set -eu
least_kib=${SRES_LEAST_SHM_KIB:-65536}
free_kib=$(df -Pk /dev/shm | awk 'NR == 2 { print $4 }')
if [ "$free_kib" -lt "$least_kib" ]; then
    echo "/dev/shm has $free_kib KiB free, $least_kib are needed" >&2
    exit 1
fi
probe=$(mktemp /dev/shm/lifecycle.XXXXXX)
rm -f "$probe"
echo "/dev/shm has $free_kib KiB free"
