# What the job scripts of this folder share: boxes on the first nodes of a job, and ranks. Sourced on the job's first
# node, whose box is the server; those of other nodes are shards of it.
#
# A script finds this file in PHUB_SLURM (default scripts/slurm: submit from the project's folder).
#
# PHUB_PORT: of the server (default 7717). PHUB_TRANSPORT: of all ranks, auto (default), tcp, verbs or ofi. PHUB_TRANSPORTS:
# what the boxes offer (default: that one; for auto tcp). With auto, ranks exchange over memory with the box on their own
# node, and over the network with the others. (Boxes that offer shm are for jobs that stay on one node.) PHUB_SERVE and
# PHUB_SHARD: options of the server's and the shards' phub serve (default --insecure: whoever reaches the port may use it).
# With TLS and tokens (phub/operating.md), in a folder that all nodes see, for example:
#
#   export PHUB_SERVE="--tls-cert $HOME/box.pem --tls-key $HOME/box.key --tokens $HOME/tokens.toml"
#   export PHUB_CA=$HOME/ca.pem PHUB_TOKEN_FILE=$HOME/token PHUB_SHARD_TOKEN_FILE=$HOME/token.admin
#
# The certificate must have the name of every node that may be the first. phub must be in PATH on the nodes with boxes.

port=${PHUB_PORT:-7717} scheme=''
[[ ${PHUB_SERVE:-} == *--tls-cert* ]] && scheme=https://
# The names of the job's nodes, the first one first.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export PHUB_SERVER=$scheme$(hostname):$port PHUB_TRANSPORT=${PHUB_TRANSPORT:-auto}
export PHUB_TRANSPORTS=${PHUB_TRANSPORTS:-${PHUB_TRANSPORT/auto/tcp}}

started=()
end_boxes() {
  local i
  for ((i = ${#started[@]} - 1; i >= 0; --i)); do  # shards first
    kill "${started[i]}" 2>/dev/null && wait "${started[i]}" || true
  done
}
trap end_boxes EXIT

# boxes NUMBER: returns when all serve. Jobs that are created then have a part at each.
boxes() {
  local tries
  # shellcheck disable=SC2086  # several options
  phub serve --listen "0.0.0.0:$port" ${PHUB_SERVE:---insecure} &
  started+=($!)
  if (($1 > 1)); then
    # shellcheck disable=SC2086
    ${PHUB_SHARD_TOKEN_FILE:+env PHUB_TOKEN_FILE="$PHUB_SHARD_TOKEN_FILE"} srun --overlap --relative 1 --nodes $(($1 - 1)) \
      --ntasks $(($1 - 1)) phub serve --join "$PHUB_SERVER" --listen 0.0.0.0:0 ${PHUB_SHARD:---insecure} &
    started+=($!)
  fi
  for ((tries = 0; tries < 300; ++tries)); do
    if [[ $(phub status --server "$PHUB_SERVER" 2>/dev/null | grep -c '^with it serves ') -eq $(($1 - 1)) ]] &&
      phub status --server "$PHUB_SERVER" >/dev/null 2>&1; then return; fi
    kill -0 "${started[0]}" || return 1
    sleep 0.2
  done
  printf 'not all of %d boxes serve after a minute\n' "$1" >&2
  return 1
}

# ranks FIRST COMMAND…: on the nodes from the FIRST on, which count from 0. A rank or node that fails does not end the others.
# The status is that of the rank that failed worst; the others have trained on.
ranks() {
  local first=$1 number=$((${#nodes[@]} - $1))
  shift
  ((number > 0)) || { printf 'no node is left for ranks: the job has %d\n' "${#nodes[@]}" >&2 && return 2; }
  # Not a name with the step in it: a rank that is started again is in a step of its own.
  PHUB_JOB=${PHUB_JOB:-slurm-$SLURM_JOB_ID} srun --overlap --relative "$first" --nodes "$number" --ntasks $((number * ${SLURM_NTASKS_PER_NODE:-1})) \
    --no-kill --kill-on-bad-exit=0 "$@"
}

(($#)) || { printf 'usage: sbatch [OPTION…] SCRIPT COMMAND…\n' >&2 && exit 2; }
