# shellcheck shell=bash
# Functions that choose the number of processes on a node and end them with their launcher. run_and_time.sh sources this
# file, and `python -m cluster tune` sources it for the defaults.

# default_processes RECIPE PYTHON: set NPROC and OMP_NUM_THREADS unless they are set.
default_processes() {
  local recipe=$1 python=$2 cores threads
  cores=$(env -u OMP_NUM_THREADS nproc)
  if [[ $recipe == tiny_cpu ]]; then
    : "${NPROC:=$((cores > 1 ? 2 : 1))}"
  elif ! command -v nvidia-smi >/dev/null; then # no GPU
    : "${NPROC:=1}"
  else
    : "${NPROC:=$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))')}"
  fi
  threads=$((cores > NPROC ? cores / NPROC : 1))
  [[ $recipe != tiny_cpu ]] || threads=$((threads < 2 ? threads : 2)) # more threads do not speed up such a small model
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$threads}"
}

# tied COMMAND...: replace this process with the command, which receives SIGTERM when its parent is killed. With util-linux
# before 2.33, it does not receive the signal.
tied() {
  ! setpriv --pdeathsig TERM true 2>/dev/null || set -- setpriv --pdeathsig TERM "$@"
  exec "$@"
}

# await_ranks CLAIM: wait until the processes of a run whose launcher was killed have ended. They notice it within seconds and
# complete the log.
await_ranks() {
  local second
  for ((second = 0; second < 60; second++)); do
    grep -qszxF "MLPERF_BERT_CLAIM=$1" /proc/[0-9]*/environ || return 0
    sleep 1
  done
  echo "warning: processes of this run are still there after a minute: end them before the next run" >&2 || true
}
