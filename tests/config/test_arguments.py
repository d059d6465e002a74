from __future__ import annotations

import pytest

from libai_data.config import default_argument_parser


def test_arguments_have_defaults_and_examples_and_a_second_config_is_left_to_the_overrides() -> None:
    args = default_argument_parser().parse_args([])
    assert (args.config_file, args.resume, args.eval_only, args.fast_dev_run, args.opts) == (
        "",
        False,
        False,
        False,
        [],
    )
    args = default_argument_parser().parse_args(["--config-file", "c.py", "other.py", "a=1"])
    assert (args.config_file, args.opts) == ("c.py", ["other.py", "a=1"])
    assert "--nnodes 2" in default_argument_parser().format_help()
    assert default_argument_parser("mine").format_help().endswith("mine\n")


@pytest.mark.parametrize(
    "line",
    [
        ["--config-file", "c.py", "--resume", "a=1", "~b"],
        ["--resume", "--config-file", "c.py", "a=1", "~b"],
        ["a=1", "~b", "--config-file", "c.py", "--resume"],
        ["a=1", "--resume", "~b", "--config-file", "c.py"],
        ["c.py", "a=1", "--resume", "~b"],
        ["a=1", "--resume", "c.py", "~b"],
        ["--resume", "a=1", "~b", "c.py"],
    ],
)
def test_config_options_and_overrides_stand_in_any_order(line: list[str]) -> None:
    args = default_argument_parser().parse_args(line)
    assert (args.config_file, args.resume, args.opts) == ("c.py", True, ["a=1", "~b"])
