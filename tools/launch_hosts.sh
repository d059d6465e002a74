#!/usr/bin/env bash
# Starts training on every GPU (or CPU rank) of all machines of a hostfile, over ssh.
#
#   bash tools/launch_hosts.sh HOSTFILE FILE CONFIG GPUS [key=value and other arguments of FILE...]
#
# HOSTFILE has a machine a line, as ssh knows it; GPUS is the number on each. The checkout, its .venv and this folder are at
# the same place on all of them. In the environment: ADDR and PORT (the first machine's address, and a port that is free
# there, by default 12345), SSH (the ssh command, with your own options), and MAX_RESTARTS (by default 0).

set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

if (($# < 4)); then
    echo "usage: [ADDR=... PORT=12345 SSH=ssh MAX_RESTARTS=0] bash tools/launch_hosts.sh HOSTFILE FILE CONFIG GPUS [key=value...]" >&2
    exit 2
fi
HOSTFILE="$1"
FILE="$2"
CONFIG="$3"
GPUS="$4"
shift 4

PYTHON="$ROOT/.venv/bin/python"
if [[ ! -x "$PYTHON" ]]; then
    PYTHON=python3
fi
# So that libai_data and configs are found from every working directory.
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
# As in LiBai: mixed precision updates a parameter and casts it in one kernel.
export ONEFLOW_FUSE_OPTIMIZER_UPDATE_CAST="${ONEFLOW_FUSE_OPTIMIZER_UPDATE_CAST:-true}"

exec "$PYTHON" -m libai_data.launch \
    --hostfile "$HOSTFILE" --ssh "${SSH:-ssh}" --max-restarts "${MAX_RESTARTS:-0}" --nproc_per_node "$GPUS" \
    ${ADDR:+--master_addr "$ADDR"} --master_port "${PORT:-12345}" \
    "$FILE" --config-file "$CONFIG" "$@"
