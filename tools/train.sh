#!/usr/bin/env bash
# Starts training on every GPU (or CPU rank) of this machine.
#
#   bash tools/train.sh FILE CONFIG GPUS [key=value and other arguments of FILE...]
#
# On several machines, run it on each with NODE (their number), NODE_RANK (0, 1, ...), ADDR (the address of machine 0)
# and PORT (a port that is free there, by default 12345) in the environment; tools/launch_hosts.sh does so over ssh. On one
# machine, MAX_RESTARTS in the environment starts the training again after a failure.

set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

if (($# < 3)); then
    echo "usage: [NODE=1 NODE_RANK=0 ADDR=127.0.0.1 PORT=12345] bash tools/train.sh FILE CONFIG GPUS [key=value...]" >&2
    exit 2
fi
FILE="$1"
CONFIG="$2"
GPUS="$3"
shift 3

NODE="${NODE:-1}"
NODE_RANK="${NODE_RANK:-0}"
ADDR="${ADDR:-127.0.0.1}"
# On a single machine, the launcher finds a free port.
if [[ "$NODE" != 1 ]]; then
    PORT="${PORT:-12345}"
fi

PYTHON="$ROOT/.venv/bin/python"
if [[ ! -x "$PYTHON" ]]; then
    PYTHON=python3
fi
# So that libai_data and configs are found from every working directory.
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
# As in LiBai: mixed precision updates a parameter and casts it in one kernel.
export ONEFLOW_FUSE_OPTIMIZER_UPDATE_CAST="${ONEFLOW_FUSE_OPTIMIZER_UPDATE_CAST:-true}"

exec "$PYTHON" -m libai_data.launch \
    --nnodes "$NODE" --node_rank "$NODE_RANK" --nproc_per_node "$GPUS" \
    --master_addr "$ADDR" ${PORT:+--master_port "$PORT"} ${MAX_RESTARTS:+--max-restarts "$MAX_RESTARTS"} \
    "$FILE" --config-file "$CONFIG" "$@"
