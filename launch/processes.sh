# shellcheck shell=bash
# Sourced by run_and_time.sh, and by `python -m cluster tune` for the defaults: how many processes a node gets, and how they
# end with whoever started them.

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
  [[ $recipe != tiny_cpu ]] || threads=$((threads < 2 ? threads : 2)) # so small a model gains nothing from more
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$threads}"
}

# tied COMMAND...: become the command, which gets SIGTERM when this script is killed. util-linux before 2.33 cannot do that.
tied() {
  ! setpriv --pdeathsig TERM true 2>/dev/null || set -- setpriv --pdeathsig TERM "$@"
  exec "$@"
}

# await_ranks CLAIM: wait until the processes of a run have ended whose launcher was killed. They notice that within seconds and
# complete the log.
await_ranks() {
  local second
  for ((second = 0; second < 60; second++)); do
    grep -qszxF "MLPERF_BERT_CLAIM=$1" /proc/[0-9]*/environ || return 0
    sleep 1
  done
  echo "warning: processes of this run are still there after a minute: end them before the next run" >&2 || true
}
