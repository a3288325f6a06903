#!/bin/bash
# slurmd inherits these, and every training process after it. RDMA registers (locks) its buffers.
set -eu
least_files=${SRES_LEAST_FILES:-1024}
files=$(ulimit -n)
locked=$(ulimit -l)
if [ "$files" != unlimited ] && [ "$files" -lt "$least_files" ]; then
    echo "only $files open files allowed, $least_files are needed; raise LimitNOFILE of slurmd" >&2
    exit 1
fi
if [ "$locked" != unlimited ] && [ -d /sys/class/infiniband ] &&
    [ -n "$(ls /sys/class/infiniband)" ]; then
    echo "locked memory is limited to $locked KiB on a node with RDMA cards;" \
        "set LimitMEMLOCK=infinity for slurmd" >&2
    exit 1
fi
echo "open files $files, locked memory $locked"
