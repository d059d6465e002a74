"""The default `train` and `graph` sections, with LiBai's keys.

They are in the package, and not only in `configs/common/`, so that an installed wheel can build a config and can check
that the keys of a config file are known. What only a config can choose (the evaluator, the schedule, the graph
classes) is None here.
"""

from __future__ import annotations

from omegaconf import DictConfig

WRITTEN_TRAIN_KEYS = (
    "resume",
    "samples",
    "warmup_iter",
    "computed",
    "dist.num_nodes",
    "dist.num_gpus_per_node",
    "dist.auto_pipeline_stage_id",
    "dist.actual_pipeline_stage_id",
)
"""Keys that a run adds to `train` itself, so that a saved config holds them: known, though nobody sets them by hand."""


def default_train() -> DictConfig:
    """A new `train` section with every key that a config may set."""
    return DictConfig(
        {
            # Where checkpoints, config.yaml, metrics and logs are written.
            "output_dir": "./output",
            # Samples of one micro batch on one data-parallel rank. Of the three sizes, any two (or the first alone)
            # determine the rest:
            # global_batch_size = train_micro_batch_size * num_accumulation_steps * data_parallel_size.
            "train_micro_batch_size": 32,
            "global_batch_size": None,
            "num_accumulation_steps": None,
            # Another global batch size from given steps on, [[first step, size], ...], as [[0, 64], [1000, 128]].
            "batch_size_schedule": None,
            # Leave out the samples that these steps would take, [[first step, last step], ...], both included.
            "skip_steps": [],
            # What may differ from the checkpoint that a run resumes from, as [seed]; otherwise it is refused. Of
            # dataset, seed, shuffle, drop_last, global_batch_size, order_version.
            "resume_override": [],
            # What of the config ranks may set differently, as [dataloader.train.dataset.root]: keys, with all below
            # them. Otherwise ranks with different configs do not start.
            "may_differ": [],
            # Steps of the optimizer to train; with train_epoch, the larger of the two is trained.
            "train_iter": 10000,
            "train_epoch": 0,
            # LiBai's configs have these keys, but nothing uses them: other values are refused.
            "consumed_train_samples": 0,
            "consumed_valid_samples": 0,
            "train_samples": None,
            # The share of all steps that warms up the learning rate; `warmup_iter` gives the steps instead.
            "warmup_ratio": 0,
            # The first step. Resuming sets it.
            "start_iter": 0,
            # Mixed precision (graph mode on GPUs).
            "amp": {"enabled": False},
            # Compute activations again in the backward pass instead of keeping them (graph mode).
            "activation_checkpoint": {"enabled": False},
            # Fusion of NCCL operations: megabytes, and number of operations.
            "nccl_fusion_threshold_mb": 16,
            "nccl_fusion_max_ops": 24,
            # Shard optimizer states over the data-parallel ranks (graph mode on GPUs).
            "zero_optimization": {"enabled": False, "stage": 1},
            # A checkpoint every `period` steps, of which the newest `max_to_keep` stay. On one of `stop_signals` the
            # training saves at the next step boundary and ends with exit code 85; [] lets signals end it at once.
            "checkpointer": {
                "period": 5000,
                "max_to_keep": 100,
                "save_model_after_n_epoch": None,
                "stop_signals": ["SIGTERM", "SIGUSR1"],
            },
            # Samples of one evaluation batch on one data-parallel rank.
            "test_micro_batch_size": 32,
            "evaluation": {
                "enabled": True,
                "evaluator": None,
                # Every `eval_period` steps (0: only after the last), over at most `eval_iter` batches (inf: all).
                "eval_period": 5000,
                "eval_after_n_epoch": None,
                "eval_iter": 100000,
                # The metric, and whether "max" or "min" of it is best, that picks the best checkpoint.
                "eval_metric": "Acc@1",
                "eval_mode": "max",
            },
            # Weights to start from, or to evaluate with --eval-only.
            "load_weight": "",
            # Names of weights, as [head.*], in which the model and `load_weight` may differ; all others must match.
            # null: in a training any may differ, with a warning, and with --eval-only none.
            "load_weight_may_differ": None,
            # Steps between two lines of the log.
            "log_period": 20,
            # Stop when a loss is NaN or infinite. Losses are read every `log_period` steps, at least every 100, and
            # before each periodic checkpoint.
            "stop_on_nonfinite_loss": True,
            # A LazyCall; the trainer fills in max_iter and warmup_iter where the config does not give them.
            "scheduler": None,
            "dist": {
                # The three sizes multiply to the number of ranks; None is derived from the others.
                "data_parallel_size": None,
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                # Required with more than one pipeline stage.
                "pipeline_num_layers": None,
                # The stage of each layer, as [0, 0, 0, 1]; None spreads the layers evenly.
                "custom_pipeline_stage_id": None,
                # "cuda" or "cpu"; without a GPU, cpu is taken either way.
                "device_type": "cuda",
            },
            # Where the batch is placed before `forward`.
            "input_placement_device": "cuda",
            "rdma_enabled": False,
            "seed": 1234,
        },
        flags={"allow_objects": True},
    )


def default_graph() -> DictConfig:
    """A new `graph` section (static graph mode) with every key that a config may set."""
    return DictConfig(
        {
            "enabled": True,
            # Verbosity of the graph's debug output; -1 is silent.
            "debug": -1,
            "auto_parallel": {
                "enabled": False,
                "enable_auto_parallel_ignore_user_sbp_config": False,
                "trunk_algo": True,
                "sbp_collector": False,
            },
            # LazyCalls of a graph class.
            "train_graph": None,
            "global_mode": {"enabled": False},
            "eval_graph": None,
        },
        flags={"allow_objects": True},
    )
