"""The command line of a training program."""

from __future__ import annotations

import argparse
import sys

_EXAMPLES = """
Examples:

On one machine with 4 ranks:
    $ python -m libai_data.launch --nproc_per_node 4 {program} --config-file configs/vit_digits.py

Change the config, and go on from the newest checkpoint:
    $ python -m libai_data.launch --nproc_per_node 4 {program} --config-file configs/vit_digits.py \\
        --resume train.dist.tensor_parallel_size=2 optim.lr=0.001 +new.key=1 '~unwanted.key'

On two machines:
    (machine 0)$ python -m libai_data.launch --nproc_per_node 4 --nnodes 2 --node_rank 0 \\
        --master_addr <machine 0> --master_port 12345 {program} --config-file configs/vit_digits.py
    (machine 1)$ python -m libai_data.launch --nproc_per_node 4 --nnodes 2 --node_rank 1 \\
        --master_addr <machine 0> --master_port 12345 {program} --config-file configs/vit_digits.py
"""


def default_argument_parser(epilog: str | None = None) -> argparse.ArgumentParser:
    """A parser with LiBai's arguments: --config-file, --resume, --eval-only, --fast-dev-run and overrides (`opts`).

    Options may stand before or after the overrides, not among them.

    Args:
        epilog: the text below the help; examples by default.
    """
    parser = argparse.ArgumentParser(
        epilog=epilog or _EXAMPLES.format(program=sys.argv[0]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config-file", default="", metavar="FILE", help="the config, a .py or .yaml file")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest checkpoint in train.output_dir; without it, an earlier run there is moved aside",
    )
    parser.add_argument("--eval-only", action="store_true", help="evaluate and do not train; all weights must fit")
    parser.add_argument(
        "--fast-dev-run",
        action="store_true",
        help="train and evaluate a few batches, to see that everything runs; only a log is left",
    )
    parser.add_argument(
        "opts",
        nargs="*",
        default=[],
        metavar="key=value",
        help="changes to the config: key=value, +key=value to add a key, ~key to delete one (Hydra's override grammar)",
    )
    return parser
