#!/usr/bin/env bash
# Which run id (TORCHELASTIC_RUN_ID) the processes of torchrun get.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install torch==2.13.0 numpy==2.4.6

cat >"$folder/program.py" <<'PYTHON'
import os

print(os.environ.get("TORCHELASTIC_RUN_ID"))
PYTHON

# ids ARGUMENT…: what two calls of torchrun give, "mine" or "random".
ids() {
  local first second
  first=$("$folder/environment/bin/torchrun" "$@" "$folder/program.py" 2>/dev/null)
  second=$("$folder/environment/bin/torchrun" "$@" "$folder/program.py" 2>/dev/null)
  if [[ $first == "$second" ]]; then echo "$first"; else echo random; fi
}

seen="$("$python" -c 'import torch; print(torch.__version__.split("+")[0])'); \
none: $(ids); --rdzv-id mine: $(ids --rdzv-id mine); \
with --standalone: $(ids --standalone --rdzv-id mine); \
with --rdzv-backend c10d: $(ids --rdzv-backend c10d --rdzv-id mine)"
verdict '--rdzv-id is the run id, and without it there is none or a fixed one' "$seen" \
  '2.13.0; none: random; --rdzv-id mine: random; with --standalone: random; with --rdzv-backend c10d: mine'
