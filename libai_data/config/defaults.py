"""The keys of configs: default, allowed values and meaning of each, in LiBai's names.

The default sections, the checks of values and the documentation's page of config keys are made from this table. Keys
whose value only a config can choose (the evaluator, the schedule, the graph classes) are None here; the configs that
`get_config` loads set these keys.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from omegaconf import DictConfig, ListConfig

from libai_data.config.signatures import TARGET
from libai_data.errors.argument_rules import FLAG, OUTPUT, TEXT, Rule, list_of, one_of, or_none, real, whole


class Key(NamedTuple):
    """A key of a config."""

    default: Any  # the value in configs that do not set the key
    rule: Rule
    meaning: str
    is_computed: bool = False  # a run adds the key to the config, so a saved config contains it


def _describes_evaluators(value: Any) -> bool:
    if isinstance(value, ListConfig):
        return all(map(_describes_evaluators, value))
    if isinstance(value, DictConfig):
        return TARGET in value
    return callable(getattr(value, "process", None))


def _unused(default: Any, instead: str) -> Rule:
    rule = one_of(default)
    return rule._replace(allowed=f"{rule.allowed}, since nothing uses it. {instead}")


def _checked_later(rule: Rule) -> Rule:
    """A rule that accepts every value, because the code that reads the key checks the value itself."""
    return rule._replace(accepts=lambda value: True)


_COUNT = whole(1)
_COUNT_OR_INF = Rule(f"{_COUNT.allowed}, or inf", lambda value: value == math.inf or _COUNT.accepts(value))
_EPOCHS = or_none(real(0, 1e9))
_TEXTS = or_none(list_of(str, "texts"))
_PAIRS = or_none(list_of(ListConfig, "lists of two, as [[0, 64], [1000, 128]]"))
_CALL = Rule("a LazyCall", lambda value: isinstance(value, DictConfig))
_CALLS = _CALL._replace(allowed="a list of LazyCalls")
_SIZE = _checked_later(or_none(_COUNT))
_UNUSED = "LiBai's configs have this key. Nothing uses it."

_TRAIN: dict[str, Key] = {
    "output_dir": Key("./output", OUTPUT, "Folder of checkpoints, `config.yaml`, metrics and logs."),
    "train_micro_batch_size": Key(
        32,
        or_none(_COUNT),
        "Samples of one micro-batch on one data-parallel rank. global_batch_size = train_micro_batch_size × "
        "num_accumulation_steps × data-parallel size: set two of the three sizes, or only the first; the others "
        "follow.",
    ),
    "global_batch_size": Key(None, or_none(_COUNT), "Samples of one step, on all ranks together."),
    "num_accumulation_steps": Key(None, or_none(_COUNT), "Micro-batches of one step: gradient accumulation."),
    "batch_size_schedule": Key(
        None, _PAIRS, "Another global batch size from given steps on: [[first step, size], ...]."
    ),
    "skip_steps": Key(
        [], _PAIRS, "Leave out the samples of these steps: [[first step, last step], ...], both included."
    ),
    "resume_override": Key(
        [],
        _TEXTS,
        "What may differ from the checkpoint on a resume, such as [seed]; any other difference is an error. Of "
        "dataset, seed, shuffle, drop_last, weights, lanes, global_batch_size, order_version and restart_data.",
    ),
    "may_differ": Key(
        [],
        _TEXTS,
        "Keys that ranks may set differently, with all keys below them, such as [dataloader.train.dataset.0.root]. "
        "Otherwise ranks with different configs do not start.",
    ),
    "train_iter": Key(10000, or_none(whole(0)), "Steps of the optimizer. With `train_epoch`, the longer one counts."),
    "train_epoch": Key(0, _EPOCHS, "Epochs to train."),
    "consumed_train_samples": Key(
        0,
        _unused(
            0, "A checkpoint holds the place in the data; 'libai-data state edit CHECKPOINT --position N' changes it"
        ),
        _UNUSED,
    ),
    "consumed_valid_samples": Key(0, _unused(0, "Every evaluation begins with the first sample"), _UNUSED),
    "train_samples": Key(None, _unused(None, "Set train.train_iter or train.train_epoch"), _UNUSED),
    "warmup_ratio": Key(0, or_none(real(0, 1)), "Share of all steps that warms up the learning rate."),
    "start_iter": Key(0, _checked_later(whole(0)), "The first step. Only the trainer sets it, on a resume."),
    "amp.enabled": Key(False, FLAG, "Mixed precision. Graph mode on GPUs only."),
    "activation_checkpoint.enabled": Key(
        False, FLAG, "Compute activations again in the backward pass instead of keeping them. Graph mode only."
    ),
    "nccl_fusion_threshold_mb": Key(16, whole(0), "Fuse NCCL operations up to this size, in MB."),
    "nccl_fusion_max_ops": Key(24, _COUNT, "Fuse at most this number of NCCL operations."),
    "zero_optimization.enabled": Key(
        False, FLAG, "Shard optimizer states over the data-parallel ranks (ZeRO). Graph mode on GPUs only."
    ),
    "zero_optimization.stage": Key(1, one_of(1, 2, 3), "Stage of ZeRO."),
    "checkpointer.period": Key(5000, _COUNT, "Steps between two checkpoints."),
    "checkpointer.max_to_keep": Key(100, or_none(_COUNT), "Number of newest checkpoints to keep; None keeps all."),
    "checkpointer.save_model_after_n_epoch": Key(None, _EPOCHS, "Epochs between two checkpoints, instead of `period`."),
    "checkpointer.stop_signals": Key(
        ["SIGTERM", "SIGUSR1"],
        _TEXTS,
        "On one of these signals the training saves at the next step boundary and ends with exit code 85. With [] a "
        "signal ends it at once.",
    ),
    "test_micro_batch_size": Key(32, _COUNT, "Samples of one evaluation batch on one data-parallel rank."),
    "evaluation.enabled": Key(True, FLAG, "Evaluate during the training and after it, if there are test loaders."),
    "evaluation.evaluator": Key(
        None,
        or_none(Rule("a LazyCall, or a list of such", _describes_evaluators)),
        "What computes the metrics. `common/train.py` sets ClsEvaluator(topk=(1, 5)).",
    ),
    "evaluation.eval_period": Key(5000, whole(0), "Steps between two evaluations; 0: only after the last step."),
    "evaluation.eval_after_n_epoch": Key(None, _EPOCHS, "Epochs between two evaluations, instead of `eval_period`."),
    "evaluation.eval_iter": Key(
        100000, _COUNT_OR_INF, "Batches of `test_micro_batch_size` samples of one evaluation at most; inf: all."
    ),
    "evaluation.eval_metric": Key("Acc@1", TEXT, "The metric that picks the best checkpoint."),
    "evaluation.eval_mode": Key("max", one_of("max", "min"), "Whether the largest or the smallest value is best."),
    "early_stopping.patience": Key(
        None,
        or_none(_COUNT),
        "End the training after this number of evaluations without an improvement; None: never.",
    ),
    "early_stopping.min_delta": Key(
        0.0, real(0, 1e300), "A change counts as an improvement only if the change is greater than this."
    ),
    "early_stopping.metric": Key(
        None, or_none(TEXT), "The metric that has to improve; None: `evaluation.eval_metric`."
    ),
    "early_stopping.mode": Key(
        None, or_none(one_of("max", "min")), "Whether the metric has to grow or to fall; None: `evaluation.eval_mode`."
    ),
    "load_weight": Key(
        "", or_none(TEXT), "Checkpoint whose weights the training starts from, or --eval-only evaluates."
    ),
    "load_weight_may_differ": Key(
        None,
        _TEXTS,
        "Names of weights, such as [head.*], in which the model and `load_weight` may differ. None: any may differ "
        "in a training, with a warning, and none with --eval-only.",
    ),
    "log_period": Key(20, _COUNT, "Steps between two lines of the log."),
    "progress_bar": Key(
        None, or_none(FLAG), "Show a progress bar, on rank 0; None: if the standard error is a terminal."
    ),
    "stop_on_nonfinite_loss": Key(
        True,
        FLAG,
        "Stop if a loss is NaN or infinite. Losses are read every `log_period` steps, at least every 100, and before "
        "each evaluation and checkpoint.",
    ),
    "scheduler": Key(
        None,
        or_none(_CALL),
        "The schedule of the learning rate. The trainer adds `max_iter` and `warmup_iter`. `common/train.py` sets "
        "WarmupCosineLR.",
    ),
    "dist.data_parallel_size": Key(
        None,
        _SIZE,
        "Ranks on the data axis. The three sizes multiply to the number of ranks; None follows from the others.",
    ),
    "dist.tensor_parallel_size": Key(1, _SIZE, "Ranks on the tensor axis."),
    "dist.pipeline_parallel_size": Key(1, _SIZE, "Ranks on the pipeline axis."),
    "dist.pipeline_num_layers": Key(
        None, or_none(_COUNT), "Layers of the model. Required with more than one pipeline stage."
    ),
    "dist.custom_pipeline_stage_id": Key(
        None, or_none(list_of(int, "ints")), "The stage of each layer, such as [0, 0, 0, 1]; None spreads them evenly."
    ),
    "dist.device_type": Key(
        "cuda", _checked_later(one_of("cuda", "cpu")), "Device of the ranks. Without a GPU, it is the CPU."
    ),
    "input_placement_device": Key("cuda", one_of("cuda", "cpu"), "Where a batch is placed before `forward`."),
    "rdma_enabled": Key(False, FLAG, "Use RDMA between nodes."),
    "seed": Key(
        1234, whole(0, 2**32 - 1), "Seed of the order, of random transforms, and of the generators of each rank."
    ),
    "resume": Key(False, FLAG, "Whether the run resumes: --resume sets it.", is_computed=True),
    "warmup_iter": Key(
        None, or_none(whole(0)), "Steps of warm-up; set either this or `warmup_ratio`.", is_computed=True
    ),
    "samples": Key(None, _SIZE, "Samples of the whole training.", is_computed=True),
    "computed": Key(
        None,
        or_none(_CALL._replace(allowed="what a trainer wrote")),
        "What the trainer computed, by key.",
        is_computed=True,
    ),
    "dist.num_nodes": Key(None, _SIZE, "Machines of the job.", is_computed=True),
    "dist.num_gpus_per_node": Key(None, _SIZE, "Ranks on each machine.", is_computed=True),
    "dist.auto_pipeline_stage_id": Key(
        None, or_none(list_of(int, "ints")), "The stage of each layer if they are spread evenly.", is_computed=True
    ),
    "dist.actual_pipeline_stage_id": Key(
        None, or_none(list_of(int, "ints")), "The stage of each layer.", is_computed=True
    ),
}

_GRAPH: dict[str, Key] = {
    "enabled": Key(True, FLAG, "Train in static graph mode; False: eager mode."),
    "debug": Key(-1, whole(-1, 3), "Verbosity of the graph's debug output; -1 is silent."),
    "auto_parallel.enabled": Key(False, FLAG, "Let OneFlow choose the SBP signatures. Graph mode only."),
    "auto_parallel.enable_auto_parallel_ignore_user_sbp_config": Key(
        False, FLAG, "Let OneFlow ignore the signatures that the model sets."
    ),
    "auto_parallel.trunk_algo": Key(True, FLAG, "Let OneFlow shorten waits by the trunk of the SBP graph."),
    "auto_parallel.sbp_collector": Key(False, FLAG, "Let OneFlow make proxies of tensors that several operators read."),
    "train_graph": Key(
        None, _checked_later(or_none(_CALL)), "The graph that trains. `common/models/graph.py` sets it."
    ),
    "global_mode.enabled": Key(False, FLAG, "OneFlow's global mode: tensors that `forward` makes are global."),
    "eval_graph": Key(None, _checked_later(or_none(_CALL)), "The graph that evaluates."),
}

_TOKENIZATION: dict[str, Key] = {
    "tokenizer": Key(
        None, _checked_later(or_none(_CALL)), "The tokenizer. Datasets with an argument for a tokenizer get it."
    ),
    "append_eod": Key(
        False,
        _unused(False, "'libai-data preprocess --append-eod' ends each document with the token"),
        _UNUSED,
    ),
    "make_vocab_size_divisible_by": Key(
        128, _COUNT, "Pad `model.cfg.vocab_size` to a multiple of this × tensor-parallel size."
    ),
}

KEYS: dict[str, Key] = {
    f"{section}.{name}": key
    for section, keys in (("train", _TRAIN), ("graph", _GRAPH), ("tokenization", _TOKENIZATION))
    for name, key in keys.items()
}
"""Every dotted key of the sections that `check_values` checks."""

SECTIONS: dict[str, Key] = {
    "model": Key(None, _CALL, "The model."),
    "optim": Key(None, _CALL, "The optimizer. The trainer adds the model to `params`. `common/optim.py` has AdamW."),
    "dataloader.train": Key(
        None,
        _CALL,
        "The training loader, or (train, validation, test) loaders. The trainer adds batch sizes, seed and tokenizer.",
    ),
    "dataloader.test": Key(None, _CALLS, "The loaders of evaluations."),
    "dataloader.consumed_samples": Key(
        None, whole(0), "Samples before the checkpoint that the run resumes from.", is_computed=True
    ),
    "datamodule": Key(None, _CALL, "A DataModule, in place of `dataloader`."),
}
"""The top-level keys whose values are LazyCalls; their own keys are arguments of the call's target."""

SECTION_NAMES = ("train", "dataloader", "datamodule", "model", "optim", "graph", "tokenization")
"""The sections of a config that code reads."""

WRITTEN_TRAIN_KEYS = tuple(name for name, key in _TRAIN.items() if key.is_computed)
"""Keys that a run adds to `train`. A saved config contains them, so they are allowed, though no user sets them."""


def default_train() -> DictConfig:
    """A new `train` section with every key that a config may set."""
    return _section(_TRAIN)


def default_graph() -> DictConfig:
    """A new `graph` section (static graph mode) with every key that a config may set."""
    return _section(_GRAPH)


def _section(keys: dict[str, Key]) -> DictConfig:
    section: dict[str, Any] = {}
    for name, key in keys.items():
        if not key.is_computed:
            *parents, last = name.split(".")
            node = section
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = key.default
    return DictConfig(section, flags={"allow_objects": True})
