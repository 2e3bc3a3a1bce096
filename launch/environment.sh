# shellcheck shell=bash
# Sourced by the commands: how they speak, and numbers from outside. A number is compared with a pattern before anything is
# computed with it: arithmetic in bash runs commands that stand in a variable, and takes 08 for a broken octal number.

# If nobody reads the output any more, or its disk is full, go on without it.
say() { echo "==> $*" 2>/dev/null || exec >/dev/null; }
fail() { echo "error: $*" >&2 && exit 2; }

# version: print what console/version.py does for the programs in Python; there may be no Python yet.
version() {
  local root number revision
  root=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/..
  number=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/pyproject.toml")
  if revision=$(git -C "$root" rev-parse HEAD 2>/dev/null); then
    revision=${revision::7}
    [[ ! $(git -C "$root" status --porcelain --untracked-files=no) ]] || revision+=" with local changes"
  else
    revision=${MLPERF_BERT_COMMIT-} && revision=${revision::7}
  fi
  [[ ${revision:-unknown} == unknown ]] || revision=" (commit $revision)"
  echo "mlperf-bert $number${revision#unknown}"
}

# usage SCRIPT ARGUMENT...: if the first argument asks for help, print the comment at the head of the script, and end; so with
# --version and one line.
usage() {
  [[ ${2-} != --version ]] || { version && exit 0; }
  [[ ${2-} == -h || ${2-} == --help ]] || return 0
  sed -n '2,/^set /{/^set /d; /^#SBATCH/d; s/^# \{0,1\}//p}' "$1"
  exit 0
}

# whole_number NAME VALUE LEAST [MOST]: end with an error that names NAME unless VALUE is a whole number from LEAST to MOST.
whole_number() {
  local name=$1 value=$2 least=$3 most=${4:-1000000000}
  if [[ ! $value =~ ^(0|[1-9][0-9]{0,17})$ ]] || ((value < least || value > most)); then
    fail "$name is ${value@Q}, expected a whole number of at least $least${4:+ and at most $4}"
  fi
}
