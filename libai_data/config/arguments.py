"""The command line of a training program."""

from __future__ import annotations

import argparse
import sys
from typing import Any

_EXAMPLES = """
Examples:

On one machine with 4 ranks:
    $ libai-data launch --nproc_per_node 4 {program} configs/vit_digits.py

Change the config, and resume from the newest checkpoint:
    $ libai-data launch --nproc_per_node 4 {program} configs/vit_digits.py \\
        train.dist.tensor_parallel_size=2 --resume optim.lr=0.001 +new.key=1 '~unwanted.key'

On two machines:
    (machine 0)$ libai-data launch --nproc_per_node 4 --nnodes 2 --node_rank 0 \\
        --master_addr <machine 0> --master_port 12345 {program} configs/vit_digits.py
    (machine 1)$ libai-data launch --nproc_per_node 4 --nnodes 2 --node_rank 1 \\
        --master_addr <machine 0> --master_port 12345 {program} configs/vit_digits.py
"""


class IntermixedParser(argparse.ArgumentParser):
    """A parser that accepts options anywhere among the other words."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self.parse_intermixed_args(args, namespace)


class _TrainingParser(IntermixedParser):
    """A parser that uses the first word that is no override as the config, if --config-file is not given."""

    def parse_known_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = super().parse_known_intermixed_args(args, namespace)
        words = [word for word in parsed.opts if "=" not in word and not word.startswith(("~", "-"))]
        if words and not parsed.config_file:
            parsed.config_file = words[0]
            parsed.opts.remove(words[0])
        return parsed, unknown


def default_argument_parser(epilog: str | None = None) -> argparse.ArgumentParser:
    """A parser with LiBai's arguments: the config, --resume, --eval-only, --fast-dev-run and overrides (`opts`).

    The config is a word of its own (`CONFIG key=value`), or follows --config-file. Options and overrides may be mixed.

    Args:
        epilog: text at the end of the help; by default some examples.
    """
    parser = _TrainingParser(
        epilog=epilog or _EXAMPLES.format(program=sys.argv[0].replace("libai-data ", "")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config-file", default="", metavar="FILE", help="the config, as LiBai's scripts name it")
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
        metavar="CONFIG key=value",
        help="the config, a .py or .yaml file, and changes to it: key=value, +key=value to add a key, ~key to delete "
        "one (Hydra's override grammar)",
    )
    return parser
