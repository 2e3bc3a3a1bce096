#!/usr/bin/env bash
# Train on hosts that may be lost and come back. First start the meeting point of the hosts (the rendezvous) on a machine
# that stays up, such as a login node:
#
#   launch/elastic.sh --meet PORT
#
# Then run this on each host, including hosts that join later or come back:
#
#   launch/elastic.sh MIN:MAX HOST:PORT RECIPE -- --checkpoint.folder DIR [--section.field value ...]
#
# MIN and MAX are the minimum and maximum numbers of hosts. DIR is a folder that all hosts can access. It identifies the run:
# a start with the same DIR continues the run.
# Environment: NPROC, the number of processes on each host (default: one per GPU, or one without GPUs); OMP_NUM_THREADS, the
# number of threads of each process; ADDRESS, the address at which other hosts reach this host (default: its name); LAST_CALL,
# the seconds to wait for more hosts once there are MIN (default: 30).
# Relative paths start at the root of the repository. Security: anybody who can reach PORT, or read the agents' traffic, can
# make torchrun's agents run code. See docs/launching.md. The exit status is torchrun's, or 2 if the input is wrong.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
source launch/venv.sh
usage launch/elastic.sh "$@"

if [[ ${1-} == --meet ]]; then
  whole_number PORT "${2-}" 1 65535
  # shellcheck disable=SC2119  # no extras
  prepare_venv
  say "hosts meet at port $2 until Ctrl-C"
  exec .venv/bin/python -c 'import signal, sys
from torch.distributed import TCPStore
store = TCPStore("0.0.0.0", int(sys.argv[1]), is_master=True, wait_for_workers=False)
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pause()' "$2"
fi

hosts=${1-} place=${2-} recipe=${3-} settings=("${@:5}") folder=
[[ $hosts =~ ^([1-9][0-9]{0,5}):([1-9][0-9]{0,5})$ && ${BASH_REMATCH[1]} -le ${BASH_REMATCH[2]} ]] ||
  fail "the numbers of hosts are ${hosts@Q}, expected MIN:MAX, such as 3:4"
[[ $place =~ ^[A-Za-z0-9._-]+:[0-9]{1,5}$ ]] || fail "the place to meet is ${place@Q}, expected HOST:PORT of --meet"
[[ $recipe && $recipe != -* && ${4---} == -- ]] || fail "expected launch/elastic.sh $hosts $place RECIPE -- settings"
for ((i = 0; i < ${#settings[@]}; i++)); do
  case ${settings[i]} in
    --checkpoint.folder) folder=${settings[i + 1]-} ;;
    --checkpoint.folder=*) folder=${settings[i]#*=} ;;
  esac
done
[[ $folder ]] || fail "a run goes on from its checkpoints: set --checkpoint.folder to a folder that all hosts see"
whole_number NPROC "${NPROC:-1}" 1
whole_number LAST_CALL "${LAST_CALL:=30}" 0 3600
extras=()
! command -v nvidia-smi >/dev/null || extras=(dali) # with a GPU, DALI loads the data
prepare_venv "${extras[@]}"
: "${NPROC:=$(.venv/bin/python -c 'import torch; print(max(1, torch.cuda.device_count()))')}"

# In PyTorch 2.13, hosts hang when a host joins later if the ranks share the agents' store, so turn the sharing off. With
# is_host=0, no host keeps the rendezvous store, so that any host may be lost. PET_ variables could override these options.
# Turn torchrun's own logs off, because they would leave a folder on each host, with a path that contains the id.
unset "${!PET_@}"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec .venv/bin/python -m torch.distributed.run --nnodes "$hosts" --nproc-per-node "$NPROC" --max-restarts 1000 \
  --rdzv-backend c10d --rdzv-endpoint "$place" --rdzv-id "$folder" ${ADDRESS:+--local-addr "$ADDRESS"} \
  --rdzv-conf "is_host=0,last_call_timeout=$LAST_CALL" --log-dir /dev/null -m bert.train "$recipe" "${settings[@]}"
