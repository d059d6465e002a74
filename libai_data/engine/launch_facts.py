"""Prints what the launcher must know about a training to restart it; see `launch/restarts.py`.

    python -m libai_data.engine.launch_facts RANKS_PER_NODE NODES [arguments of the training]

prints a line of JSON: the folder of the checkpoints, and for each of 1 to NODES nodes why the config cannot run there.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from libai_data.config import default_argument_parser
from libai_data.config.lazy_config import load_config
from libai_data.engine.step_plan import step_plan
from libai_data.errors import ConfigError, MeshError
from libai_data.mesh.parallel_mesh import ParallelMesh


def main(argv: Sequence[str]) -> int:
    """Print the line of JSON; `argv` are the arguments above."""
    ranks_per_node, nodes = int(argv[0]), int(argv[1])
    # The user's program may have other arguments, too.
    args, _ = default_argument_parser().parse_known_intermixed_args(list(argv[2:]))
    facts: dict[str, Any] = {"checkpoints": "", "problems": {}}
    if args.config_file.endswith((".py", ".yaml", ".yml")):
        cfg = load_config(args.config_file, [word for word in args.opts if not word.startswith("-")])
        facts["checkpoints"] = os.path.abspath(str(cfg.train.output_dir))
        facts["problems"] = {count: problem_on(cfg, count, nodes, ranks_per_node) for count in range(1, nodes + 1)}
    print(json.dumps(facts))
    return 0


def problem_on(cfg: Any, nodes: int, nodes_before: int, ranks_per_node: int) -> str:
    """Why a training on `nodes_before` nodes cannot continue with the same stream on `nodes` nodes; "" if it can."""
    try:
        meshes = [
            ParallelMesh.from_config(cfg.train.dist, world_size=count * ranks_per_node, num_nodes=count)
            for count in (nodes, nodes_before)
        ]
        steps, steps_before = (step_plan(cfg, mesh.data_parallel_size).schedule.sizes for mesh in meshes)
    except (ConfigError, MeshError) as error:
        return str(error)
    if steps != steps_before:
        return (
            f"a step would take {steps[0][1]} samples instead of {steps_before[0][1]}; set train.global_batch_size, "
            "which does not depend on the number of ranks"
        )
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
