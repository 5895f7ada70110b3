# What the scripts share. Sourced from the root of the project.
# shellcheck shell=bash

# For what runs with sanitizers: they do not start where the kernel spreads addresses over more bits than they expect.
export LSAN_OPTIONS=suppressions=$PWD/tests/leaks.txt:print_suppressions=0
# shellcheck disable=SC2034 # used by those who source this
without_aslr=()
if setarch -R true 2>/dev/null; then without_aslr=(setarch -R); fi

# Runs a command quietly; what it printed is shown only when it fails.
quiet() {
  local output status=0
  output=$(mktemp)
  "$@" >"$output" 2>&1 || status=$?
  if ((status != 0)); then cat "$output" >&2; fi
  rm -f "$output"
  return "$status"
}

# stage NAME COMMAND…: one line with the name and how long the command took.
stage() {
  local name=$1 begin status=0
  shift
  printf '%-44s ' "$name …"
  begin=$(date +%s%N)
  local output
  output=$(mktemp)
  "$@" >"$output" 2>&1 || status=$?
  local tenths=$((($(date +%s%N) - begin) / 100000000))
  if ((status == 0)); then
    printf '%d.%d s\n' $((tenths / 10)) $((tenths % 10))
  else
    printf 'FAILED after %d.%d s\n' $((tenths / 10)) $((tenths % 10))
    cat "$output"
  fi
  rm -f "$output"
  return "$status"
}

# Configures and builds a preset: build_preset PRESET [TARGET…]. One at a time does so: two that configure the same
# folder take each other's files away.
build_preset() {
  local preset=$1
  shift
  mkdir -p build
  (
    flock 9
    cmake --preset "$preset" && cmake --build --preset "$preset" ${1:+--target "$@"}
  ) 9>build/configuring
}

# python_environment FOLDER PACKAGES: a virtual environment with these packages of PyPI, which stays until the list is
# another one. Fails with the reason on standard output.
python_environment() {
  local folder=$1 wanted=$2 limit_s=900
  if [[ "$(cat "$folder/installed" 2>/dev/null)" == "$wanted" ]]; then return; fi
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    { echo "python3 is $(python3 --version 2>&1 || true): the package needs 3.10 or later" && return 1; }
  rm -rf "$folder"
  python3 -m venv "$folder" || { echo 'python3 -m venv failed: the package python3-venv has it' && return 1; }
  # shellcheck disable=SC2086
  timeout --kill-after=10 "$limit_s" \
    "$folder/bin/pip" install -q --disable-pip-version-check --retries 2 $wanted ||
    { echo "pip cannot install $wanted within $limit_s s (no PyPI?): the error is above" && return 1; }
  echo "$wanted" >"$folder/installed"
}
