# Sourced by findings: a temporary environment with pinned packages, and a verdict.
set -euo pipefail
export PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV

# What a program says there is shown if the script fails.
folder=$(mktemp -d)
errors=$folder/errors
end() {
  local -r status=$?
  [[ $status == 0 || $status == 77 || ! -s $errors ]] || cat "$errors" >&2
  rm -rf "$folder"
}
trap end EXIT

# install PACKAGE==VERSION…: makes $python an interpreter that has them.
install() {
  python3 -m venv "$folder/environment"
  python=$folder/environment/bin/python
  "$python" -m pip install -q --disable-pip-version-check "$@" || {
    echo "pip cannot install $* here"
    exit 77
  }
}

# verdict GUESS SEEN EXPECTED: fails unless what was seen is what was found before.
verdict() {
  printf 'guess: %s\nseen:  %s\n' "$1" "$2"
  [[ $2 == "$3" ]] || {
    printf 'This has changed. Before it was:\n       %s\n' "$3"
    exit 1
  }
}
