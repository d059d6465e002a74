"""The training command: `libai-data train`; `tools/train_net.py` runs it too."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from libai_data.config import default_argument_parser, try_get_key
from libai_data.config.lazy_config import load_config
from libai_data.config.values import check_values, given
from libai_data.data.datasets.class_numbers import ClassNumbers
from libai_data.engine.built_parts import as_test_loaders, as_three_loaders, built_by
from libai_data.engine.checkpoint import Checkpointer
from libai_data.engine.data_state import PlainState, has_state
from libai_data.engine.default_trainer import DefaultTrainer
from libai_data.engine.failure import end_job_on_failure
from libai_data.engine.output_folder import clear_trial
from libai_data.engine.running_stages import RunsStages, stages_of
from libai_data.engine.setup import default_setup, seed_all, set_key
from libai_data.errors import ConfigError
from libai_data.iterables.iterable_loader import indexed_dataset_of
from libai_data.loader.arena import open_standard_descriptors

logger = logging.getLogger(__name__)

_FAST_STEPS = 20
_FAST_EVAL_PERIOD = 10


def main(argv: Sequence[str] | None = None, trainer_class: type[DefaultTrainer] = DefaultTrainer) -> dict[str, Any]:
    """Train or evaluate the model of a config file with `key=value` overrides.

    ::

        libai-data train CONFIG key=value --resume
        libai-data launch --nproc_per_node 4 train CONFIG key=value --resume

    Args:
        argv: command line; by default the process's own.
        trainer_class: `DefaultTrainer`, or a subclass of it.

    Returns:
        Results of the last evaluation.
    """
    open_standard_descriptors()  # Otherwise the next files would get their numbers, and what OneFlow prints.
    parser = default_argument_parser()
    args = parser.parse_args(argv)
    if not args.config_file:
        parser.error("no config is given; give the path of a .py or .yaml file.")
    place = {"RANK": 0, "WORLD_SIZE": 1}
    for name in place:
        value = os.environ.get(name) or place[name]
        try:
            place[name] = int(value)
        except ValueError:
            parser.error(f"{name} is {value!r}; start the ranks by libai-data launch, or set it to a number")
    with end_job_on_failure(place["RANK"], place["WORLD_SIZE"]):
        importlib.import_module("oneflow")  # where the ranks find each other
        return run(args, trainer_class)


def run(args: Any, trainer_class: type[DefaultTrainer] = DefaultTrainer) -> dict[str, Any]:
    """Train or evaluate as the parsed command line says; returns the results of the last evaluation."""
    cfg = load_config(args.config_file, args.opts)
    if args.fast_dev_run:
        check_values(cfg)  # Check the user's values before `shorten` replaces some of them.
        shorten(cfg)
    default_setup(cfg, args)
    seed_all(cfg.train.seed)
    if args.eval_only:
        return evaluate(cfg, trainer_class, resume=cfg.train.resume)
    try:
        return trainer_class(cfg).train()
    finally:
        if args.fast_dev_run:
            clear_trial(str(cfg.train.output_dir))


def shorten(cfg: Any) -> None:
    """Shorten a training to a trial of 20 steps: an evaluation of at most 20 batches every 10 steps, each step logged.

    `default_setup` gives the trial a separate folder. `run` deletes all but the log.
    """
    cfg.train.train_epoch = 0
    cfg.train.train_iter = _FAST_STEPS
    cfg.train.log_period = 1
    cfg.train.evaluation.eval_period = _FAST_EVAL_PERIOD
    cfg.train.evaluation.eval_after_n_epoch = None
    cfg.train.evaluation.eval_iter = min(cfg.train.evaluation.eval_iter, _FAST_STEPS)
    for key in ("train.warmup_iter", "train.scheduler.warmup_iter"):
        if isinstance(given(cfg, key), int):
            set_key(cfg, key, min(given(cfg, key), _FAST_STEPS))


def evaluate(cfg: Any, trainer_class: type[DefaultTrainer], resume: bool) -> dict[str, Any]:
    """Evaluate the last checkpoint (`resume`), or the weights of `train.load_weight`.

    Raises:
        CheckpointError: There is no checkpoint to resume.
        ConfigError: There is neither a checkpoint nor `train.load_weight`, or there is nothing to evaluate on.
    """
    tokenizer = built_by(trainer_class, "build_tokenizer", cfg)
    model = built_by(trainer_class, "build_model", cfg)
    checkpointer = Checkpointer(model, cfg.train.output_dir)
    path = checkpointer.checkpoint_to_resume() if resume else cfg.train.load_weight
    if not path:
        raise ConfigError(
            "--eval-only found no weights: set train.load_weight=<checkpoint>, or use --resume with a checkpoint in "
            f"train.output_dir ({cfg.train.output_dir})"
        )
    checkpointer.load_weights(path, cfg.train.load_weight_may_differ or ())
    data = stages_of(cfg)
    if data is not None:
        trainer = data.datamodule.trainer = RunsStages()  # whose flags the hooks of the module read
        trainer.training, trainer.testing = False, True
        data.enter("test")
        if has_state(data.datamodule):
            checkpointer.stateful["datamodule"] = PlainState(data)
    saved = checkpointer.peek(path).get("stateful", {})
    for name, part in checkpointer.stateful.items():
        if name in saved:
            part.load_state_dict(saved[name])
    if data is None:
        loaders = as_test_loaders(built_by(trainer_class, "build_test_loader", cfg, tokenizer))
        if not loaders and _builds_train_loader(cfg, trainer_class):
            # As a training does; with test loaders, the train dataset would be built for nothing.
            _, *others = as_three_loaders(built_by(trainer_class, "build_train_loader", cfg, tokenizer))
            loaders = [loader for loader in others if loader is not None]
    else:
        loaders = data.loaders("test")
    if not loaders:
        lacks = "no dataloader.test, and build_train_loader gives no other"
        raise ConfigError(
            "--eval-only has nothing to evaluate on: the config has "
            + (lacks if data is None else "a datamodule without test_dataloader")
        )
    ClassNumbers(map(indexed_dataset_of, loaders)).load_state_dict(saved.get("classes", {}))
    model.eval()
    if try_get_key(cfg, "graph.enabled", default=False):
        model = built_by(trainer_class, "build_graph", cfg, model, is_train=False)
    given = {} if data is None else {"data": data}
    results: dict[str, Any] = built_by(trainer_class, "test", cfg, loaders, model, **given)
    if data is not None:
        data.leave("test")
    return results


def _builds_train_loader(cfg: Any, trainer_class: type[DefaultTrainer]) -> bool:
    name = "build_train_loader"
    is_overridden = inspect.getattr_static(trainer_class, name) is not vars(DefaultTrainer)[name]
    return is_overridden or try_get_key(cfg, "dataloader.train") is not None


if __name__ == "__main__":
    # argparse shows this as the program's name. The launcher starts this module for `launch train`.
    sys.argv[0] = "libai-data train"
    main()
