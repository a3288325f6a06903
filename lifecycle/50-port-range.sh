#!/bin/sh
# Every rank listens on ephemeral ports: one for the mesh, one for each process group. A range that
# was made narrow fails in the middle of a recovery, when old and new groups exist together.
# What is set here begins at 30000: MASTER_PORT of our attempts lies in 20000-29999. It lasts until the
# next boot, when this runs again.
set -eu
file=${SRES_PORT_RANGE_FILE:-/proc/sys/net/ipv4/ip_local_port_range}
# As many as the kernel gives by itself.
least=${SRES_LEAST_PORTS:-28232}
wanted=${SRES_PORT_RANGE:-30000 65535}
width() { echo $(($2 - $1 + 1)); }
look() {
    # Not by `read`: it asks for one byte at a time, and the kernel gives such a file only at once.
    if ! values=$(cat "$file" 2>/dev/null); then
        echo "$file cannot be read" >&2
        exit 1
    fi
    # shellcheck disable=SC2086 # two numbers
    have=$(width $values)
    # shellcheck disable=SC2086 # two numbers
    range=$(printf '%s-%s' $values)
}
look
if [ "$have" -ge "$least" ]; then
    echo "ephemeral ports $range"
    exit 0
fi
# shellcheck disable=SC2086 # two numbers
if [ "$(width $wanted)" -lt "$least" ]; then
    echo "SRES_PORT_RANGE holds $(width $wanted) ports, $least are needed" >&2
    exit 1
fi
before=$range
if ! echo "$wanted" 2>/dev/null >"$file"; then
    echo "only $have ephemeral ports ($before), $least are needed; as root:" \
        "sysctl -w net.ipv4.ip_local_port_range=\"$wanted\"" >&2
    exit 1
fi
look
if [ "$have" -lt "$least" ]; then
    echo "ephemeral ports stayed $range although $wanted was set" >&2
    exit 1
fi
echo "ephemeral ports $range (were $before)"
