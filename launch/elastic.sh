#!/usr/bin/env bash
# Training on hosts that may be lost and come back. First, where they meet, on a machine that stays, such as a login node:
#
#   launch/elastic.sh --meet PORT
#
# then on each host, also on one that comes later or again:
#
#   launch/elastic.sh MIN:MAX HOST:PORT RECIPE -- --checkpoint.folder DIR [--section.field value ...]
#
# MIN and MAX are numbers of hosts; DIR is a folder that all of them see, and names the run: with the same one it goes on.
# Environment: NPROC, the number of processes on each host (default: one a GPU, or one); OMP_NUM_THREADS, the threads of each;
# ADDRESS, this host's own for the others (default: its name); LAST_CALL, seconds to wait for more than MIN hosts (default: 30).
# Relative paths start at the repository's root. torchrun's agents run what anybody writes who reaches PORT, or reads as they
# meet: see docs/launching.md. Exit status: torchrun's, or 2 where the input is wrong.
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

# In PyTorch 2.13, hosts that share a store of the agents' wait for ever for one that comes later. is_host=0: none of them
# keeps the store in which they meet, so that any may be lost. Variables could ask for something else. torchrun's own logs go
# nowhere: it would leave a folder behind on each host, whose path it makes from the id.
unset "${!PET_@}"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec .venv/bin/python -m torch.distributed.run --nnodes "$hosts" --nproc-per-node "$NPROC" --max-restarts 1000 \
  --rdzv-backend c10d --rdzv-endpoint "$place" --rdzv-id "$folder" ${ADDRESS:+--local-addr "$ADDRESS"} \
  --rdzv-conf "is_host=0,last_call_timeout=$LAST_CALL" --log-dir /dev/null -m bert.train "$recipe" "${settings[@]}"
