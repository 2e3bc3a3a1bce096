#!/usr/bin/env bash
# Run one of a node's processes on the cores nearest to its GPU:
#
#   launch/bind.sh COMMAND [ARGUMENT...]
#
# The launcher sets the local rank (LOCAL_RANK, SLURM_LOCALID or OMPI_COMM_WORLD_LOCAL_RANK). Without it, the command runs
# unbound. GPU i is the i-th NVIDIA display device in the order of PCI addresses, or the i-th number in
# CUDA_VISIBLE_DEVICES. The script sets CUDA_DEVICE_ORDER=PCI_BUS_ID to match. Processes that share a NUMA node split its
# cores. If there are no GPUs or no NUMA nodes, if the GPUs are of several kinds, or if CUDA_VISIBLE_DEVICES does not hold
# numbers, all processes split the allowed cores. The hardware threads of a core stay together. Memory is allocated on the
# same NUMA node if possible. OMP_NUM_THREADS is set unless it is set already. NCCL chooses the network cards; NCCL_IB_HCA
# must be the same on all ranks. BIND=off turns binding off, and BIND=show prints the binding without running the command.
# SYSFS is the folder from which the topology is read (default: /sys).
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/environment.sh"
usage "${BASH_SOURCE[0]}" "$@"
shopt -s nullglob
sys=${SYSFS:-/sys}
rank=${LOCAL_RANK:-${SLURM_LOCALID:-${OMPI_COMM_WORLD_LOCAL_RANK:-}}}
# Slurm writes the number of tasks per node as "8" or "8(x2)".
ranks=${LOCAL_WORLD_SIZE:-${SLURM_STEP_TASKS_PER_NODE:-${OMPI_COMM_WORLD_LOCAL_SIZE:-}}}
ranks=${ranks%%[(,]*}
(($#)) || fail "launch/bind.sh: no command given"
[[ ${BIND-} != off && $rank && $ranks ]] || exec "$@"
whole_number "the local rank" "$rank" 0
whole_number "the number of local ranks" "$ranks" 1
whole_number OMP_NUM_THREADS "${OMP_NUM_THREADS:-1}" 1
((rank < ranks)) || exec "$@"

value() { [[ ! -r $1 ]] || cat "$1"; }
# expand LIST: print a list such as "0-3,8" as one number per line.
expand() {
  local part
  for part in ${1//,/ }; do seq "${part%-*}" "${part#*-}"; done
}
# pci_devices CLASS VENDOR: print the PCI addresses (0000:07:00.0) of the vendor's devices whose class starts with CLASS.
pci_devices() {
  local device
  for device in "$sys"/bus/pci/devices/*; do
    [[ $(value "$device/class") != "$1"* || $(value "$device/vendor") != "$2" ]] || echo "${device##*/}"
  done
}
numa_node() { value "$sys/bus/pci/devices/$1/numa_node"; }

allowed=$(expand "${ALLOWED_CPUS:-$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status)}")
mapfile -t gpus < <(pci_devices 0x03 0x10de)
# If GPUs differ, CUDA puts the fastest one first, so their order is unknown here. If CUDA_VISIBLE_DEVICES does not hold
# numbers, it is unknown which GPUs are visible.
kinds=$(for gpu in "${gpus[@]}"; do value "$sys/bus/pci/devices/$gpu/device"; done | sort -u | wc -l)
if ((kinds > 1)) || [[ ! ${CUDA_VISIBLE_DEVICES:-0} =~ ^[0-9]{1,3}(,[0-9]{1,3})*$ ]]; then
  gpus=()
elif [[ ${CUDA_VISIBLE_DEVICES-} ]]; then
  mapfile -t gpus < <(for number in ${CUDA_VISIBLE_DEVICES//,/ }; do echo "${gpus[10#$number]-}"; done)
fi
node='' position=$rank sharers=$ranks
if ((${#gpus[@]} >= ranks)); then
  node=$(numa_node "${gpus[rank]}")
  [[ $node =~ ^[0-9]+$ ]] || node= # -1: the firmware does not say
fi
cpus=$allowed
if [[ $node && -r $sys/devices/system/node/node$node/cpulist ]]; then
  near=$(comm -12 <(sort <<<"$allowed") <(expand "$(<"$sys/devices/system/node/node$node/cpulist")" | sort))
  if [[ $near ]]; then
    cpus=$near position=0 sharers=0
    for ((other = 0; other < ranks; other++)); do
      [[ $(numa_node "${gpus[other]}") == "$node" ]] || continue
      ((other >= rank)) || position=$((position + 1))
      sharers=$((sharers + 1))
    done
  else
    node=
  fi
else
  node=
fi

# Distribute cores rather than hardware threads: each line contains the allowed threads of one core.
mapfile -t cores < <(sort -n <<<"$cpus" | while read -r cpu; do
  siblings=$(value "$sys/devices/system/cpu/cpu$cpu/topology/thread_siblings_list")
  comm -12 <(expand "${siblings:-$cpu}" | sort) <(sort <<<"$cpus") | sort -n | paste -sd,
done | awk '!seen[$0]++')
if ((${#cores[@]} >= sharers)); then
  begin=$((position * ${#cores[@]} / sharers)) end=$(((position + 1) * ${#cores[@]} / sharers))
else # fewer cores than processes: each process gets one core, which it may share
  begin=$((position % ${#cores[@]})) end=$((position % ${#cores[@]} + 1))
fi
mine=$(IFS=, && echo "${cores[*]:begin:end-begin}")

environment=(OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((end - begin))}")
((${#gpus[@]} == 0)) || environment+=(CUDA_DEVICE_ORDER=PCI_BUS_ID)
place=(taskset --cpu-list "$mine")
if command -v numactl >/dev/null; then
  place=(numactl --physcpubind="$mine")
  [[ ! $node ]] || place+=(--preferred="$node")
fi
if [[ ${BIND-} == show ]]; then
  echo "local rank $rank of $ranks: GPU ${gpus[rank]-none}, NUMA node ${node:-unknown}, ${environment[*]}, ${place[*]}"
elif "${place[@]}" true 2>/dev/null; then
  exec env "${environment[@]}" "${place[@]}" "$@"
else # binding is not permitted, or neither program is installed
  exec env "${environment[@]}" "$@"
fi
