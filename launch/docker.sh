#!/usr/bin/env bash
# Run the image of Dockerfile on this machine, with its GPUs. The arguments are the same as for run_and_time.sh:
#
#   IMAGE=mlperf-bert launch/docker.sh h100_1x8 10 [-- --section.field value ...]
#
# Environment: IMAGE (default: mlperf-bert); ENGINE, docker or podman (default: the installed one); DATA and RESULTS, the
# folders on this machine that are mounted as data/ and results/ (default: data/ and results/ of the repository); CACHE, the
# folder that keeps compiled kernels for the next container (default: .cache/container of the repository). NPROC and
# OMP_NUM_THREADS are passed to the container. After Ctrl-C or SIGTERM, the run ends with a complete log. The exit status is
# the exit status of run_and_time.sh.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
source launch/environment.sh
usage launch/docker.sh "$@"

engine=${ENGINE:-$(command -v docker || command -v podman)} || fail "there is neither docker nor podman here: install one"
command -v "$engine" >/dev/null || fail "there is no $engine here: set ENGINE to docker or podman"
[[ ${IMAGE:=mlperf-bert} != -* ]] || fail "IMAGE is ${IMAGE@Q}, expected the name of an image"
# folder NAME VALUE: create the folder VALUE and print its full path. A colon is refused because it separates the fields of
# a mount.
folder() {
  local path
  path=$(readlink --canonicalize-missing -- "$2")
  [[ $2 != -* && $path != *:* ]] || fail "$1 is ${2@Q}, expected a folder whose full path has no colon"
  mkdir -p "$path" && echo "$path"
}
data=$(folder DATA "${DATA:-data}")
results=$(folder RESULTS "${RESULTS:-results}")
cache=$(umask 077 && folder CACHE "${CACHE:-.cache/container}") # Triton refuses a cache that other users can write to

options=(
  run --rm --init --user "$(id -u):$(id -g)" --network host --ipc host # NCCL shares memory between processes
  --security-opt no-new-privileges
  --ulimit memlock=-1 --ulimit stack=67108864 --cap-add SYS_NICE # locked memory, NUMA policies
  --stop-timeout 120
  --volume "$data:/workspace/bert/data" --volume "$results:/workspace/bert/results"
  --volume "$cache:/cache" --env HOME=/cache
  --env NPROC --env OMP_NUM_THREADS --env PYTHONUNBUFFERED=1
)
[[ ! -t 0 || ! -t 1 ]] || options+=(--tty --interactive) # with a terminal, lines fit its width
if command -v nvidia-smi >/dev/null; then
  case ${engine##*/} in
    podman) options+=(--device nvidia.com/gpu=all) ;; # CDI; /etc/cdi/nvidia.yaml comes from nvidia-ctk cdi generate
    *) options+=(--gpus all) ;;
  esac
fi
[[ ${engine##*/} != podman || $(id -u) == 0 ]] || options+=(--userns keep-id)
[[ ! -e /dev/infiniband ]] || options+=(--device /dev/infiniband)
exec "$engine" "${options[@]}" "$IMAGE" "$@"
