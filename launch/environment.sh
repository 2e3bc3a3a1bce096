# shellcheck shell=bash
# Functions for messages and for the validation of numbers, sourced by the other scripts. A number is matched against a
# pattern before it is used in arithmetic, because bash arithmetic executes commands that are contained in a variable, and
# reads 08 as an invalid octal number.

# If the output cannot be written, because its reader is gone or the disk is full, continue without output.
say() { echo "==> $*" 2>/dev/null || exec >/dev/null; }
fail() { echo "error: $*" >&2 && exit 2; }

# version: print the same line as console/version.py. This does not call Python, which may not be installed yet.
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

# usage SCRIPT ARGUMENT...: print the comment at the head of the script and exit if the first argument is -h or --help, or
# print the version and exit if it is --version.
usage() {
  [[ ${2-} != --version ]] || { version && exit 0; }
  [[ ${2-} == -h || ${2-} == --help ]] || return 0
  sed -n '2,/^set /{/^set /d; /^#SBATCH/d; s/^# \{0,1\}//p}' "$1"
  exit 0
}

# whole_number NAME VALUE LEAST [MOST]: exit with an error about NAME unless VALUE is a whole number from LEAST to MOST.
whole_number() {
  local name=$1 value=$2 least=$3 most=${4:-1000000000}
  if [[ ! $value =~ ^(0|[1-9][0-9]{0,17})$ ]] || ((value < least || value > most)); then
    fail "$name is ${value@Q}, expected a whole number of at least $least${4:+ and at most $4}"
  fi
}
