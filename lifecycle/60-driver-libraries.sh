#!/bin/sh
# On a node with NVIDIA GPUs, programs need the driver's libraries. An image that was built beside a
# GPU may bring empty ones, and then the node is well and every job on it fails.
set -eu
devices=${SRES_PCI_DEVICES:-/sys/bus/pci/devices}
libraries=${SRES_DRIVER_LIBRARIES:-libnvidia-ml.so.1 libcuda.so.1}
gpus=0
for device in "$devices"/*; do
    [ -r "$device/vendor" ] && [ -r "$device/class" ] || continue
    # 0x10de: NVIDIA; 0x0300 and 0x0302: display and 3D controllers.
    case "$(cat "$device/vendor") $(cat "$device/class")" in
        "0x10de 0x0300"* | "0x10de 0x0302"*) gpus=$((gpus + 1)) ;;
    esac
done
if [ "$gpus" -eq 0 ]; then
    echo "no NVIDIA GPU, no driver library needed"
    exit 0
fi
for library in $libraries; do
    path=$(${SRES_LDCONFIG:-ldconfig} -p | awk -v name="$library" '$1 == name { print $NF; exit }')
    if [ -z "$path" ]; then
        echo "$gpus GPUs, and $library is not installed; install the driver's libraries" >&2
        exit 1
    fi
    if [ ! -s "$path" ]; then
        echo "$gpus GPUs, and $path is empty or missing; install the driver's libraries again" >&2
        exit 1
    fi
done
echo "$gpus GPUs, $libraries are there"
