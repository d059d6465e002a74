"""Each key of the default config is read, and what the user gives is kept or refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from omegaconf import DictConfig, OmegaConf

from libai_data.config import LazyCall, default_graph, default_train
from libai_data.config.defaults import KEYS
from libai_data.data.datasets import ConcatDataset, Subset
from libai_data.delivery.build import build_nlp_train_val_test_loader
from libai_data.engine import DefaultTrainer, default_setup, setup
from libai_data.engine.loaders import build_configured_test_loaders, build_configured_train_loader
from libai_data.engine.setup import complete_train_config
from libai_data.errors import ConfigError
from libai_data.mesh.parallel_mesh import ParallelMesh
from tests.config.test_values import leaves
from tests.engine.tiny import TinyDataset, TinyModel, tiny_config
from tests.properties import slowly

# Only the defaults of the first three are accepted (tests/config/test_values.py); the comparison of the ranks' configs
# reads the fourth (tests/engine/test_agreement.py).
NOT_READ = {"train.train_samples", "train.consumed_train_samples", "train.consumed_valid_samples", "train.may_differ"}
CHECKS = {f"{name}.py" for name in ("defaults", "keys", "values", "yaml_format", "agreement", "signatures")}


@contextmanager
def reads() -> Iterator[set[str]]:
    """The keys that are read meanwhile, but for those reads that only check, compare or save the whole config."""
    found: set[str] = set()
    original = DictConfig._get_node

    def recording(self: DictConfig, key: Any, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        while "omegaconf" in frame.f_code.co_filename or frame.f_code.co_name == "try_get_key":
            frame = frame.f_back  # type: ignore[assignment]
        file = Path(frame.f_code.co_filename)
        if "libai_data" in file.parts and (file.name not in CHECKS or frame.f_code.co_name == "given"):
            found.add(self._get_full_key(key))
        return original(self, key, *args, **kwargs)

    with mock.patch.object(DictConfig, "_get_node", recording):
        yield found


class Checkpointed(TinyModel):
    """Knows how to recompute its activations."""

    @staticmethod
    def set_activation_checkpoint(model: Any) -> None:
        """Nothing, for a model as small as this."""


@pytest.mark.parametrize("graph", [False, True])
def test_a_training_reads_every_default_key(tmp_path: Path, graph: bool) -> None:
    cfg = tiny_config(str(tmp_path), train_iter=2, graph=graph, load_weight=str(tmp_path / "model_final"))
    cfg.model._target_ = Checkpointed
    cfg.train.checkpointer.period, cfg.train.early_stopping.patience = 1, 9
    if graph:
        cfg.train.activation_checkpoint.enabled = True
    with reads() as found:
        default_setup(cfg)
        with mock.patch("libai_data.engine.checkpoint.Checkpointer.load_weights"):
            trainer = DefaultTrainer(cfg)
            trainer.train()
        if graph:
            cfg.graph.auto_parallel.enabled = True
            DefaultTrainer.build_graph(cfg, trainer.model, is_train=False)
        # What only pipelines, and jobs on GPUs, read.
        pipeline = {**default_train().dist, "pipeline_parallel_size": 2, "pipeline_num_layers": 3}
        ParallelMesh.from_config(DictConfig({"train": {"dist": pipeline}}).train.dist, world_size=2)
        nccl, env = mock.Mock(), mock.Mock()
        cfg.train.rdma_enabled = True
        fake = SimpleNamespace(boxing=SimpleNamespace(nccl=nccl), env=env)
        with mock.patch.dict(sys.modules, oneflow=fake), mock.patch.object(setup, "get_world_size", return_value=2):
            setup._configure_nccl(cfg)
    nccl.set_fusion_threshold_mbytes.assert_called_with(16)
    nccl.set_fusion_max_ops_num.assert_called_with(24)
    env.init_rdma.assert_called_once_with()
    sections = {"train": default_train(), **({"graph": default_graph()} if graph else {})}
    keys = {key for name, section in sections.items() for key in leaves(section, name)}
    if not graph:
        keys -= {f"train.{name}" for name in ("zero_optimization.stage", "zero_optimization.enabled")}
        keys -= {"train.activation_checkpoint.enabled"}
    assert sorted(keys - found - NOT_READ) == []
    # And it reads no other: the table of keys is complete.
    known = {*KEYS, *(name[: name.rindex(".")] for name in KEYS)}
    other = {key for key in found - known if key.startswith(("train.", "graph."))}
    calls = (
        "train.scheduler.",
        "train.evaluation.evaluator.",
        "train.computed.",
        "graph.train_graph.",
        "graph.eval_graph.",
    )
    assert {key for key in other if not key.startswith(calls) and not key.endswith("_")} == set()


def built(cfg: Any) -> DefaultTrainer:
    default_setup(cfg)
    return DefaultTrainer(cfg)


def test_a_given_warm_up_and_horizon_are_kept(tmp_path: Path) -> None:
    def schedule_of(**changes: Any) -> Any:
        cfg = tiny_config(str(tmp_path), warmup_ratio=0)
        OmegaConf.update(cfg, "train", changes)
        built(cfg)
        return cfg.train.warmup_iter, cfg.train.scheduler.warmup_iter, cfg.train.scheduler.max_iter

    assert schedule_of() == (0, 0, 12)
    assert schedule_of(warmup_iter=5) == (5, 5, 12)
    assert schedule_of(scheduler={"warmup_iter": 4, "max_iter": 20}) == (0, 4, 20)
    assert schedule_of(warmup_ratio=0.25) == (3, 3, 12)
    assert schedule_of(warmup_ratio=0.25, warmup_iter=3) == (3, 3, 12)
    with pytest.raises(ConfigError, match=r"train.warmup_iter is 5, but train.warmup_ratio is 0.25"):
        schedule_of(warmup_ratio=0.25, warmup_iter=5)
    with pytest.raises(ConfigError, match=r"train.warmup_iter is 13, .* train.train_iter 12"):
        schedule_of(warmup_iter=13)
    with pytest.raises(ConfigError, match=r"warmup_iter is 21, and max_iter 20"):
        schedule_of(scheduler={"warmup_iter": 21, "max_iter": 20})


def test_a_config_that_trained_once_trains_again_with_other_lengths(tmp_path: Path) -> None:
    cfg = tiny_config(str(tmp_path))
    cfg.train.train_iter, cfg.train.train_epoch = 0, 4
    for epochs, steps in ((4, 20), (2, 10), (6, 30)):
        cfg.train.train_epoch = epochs
        built(cfg)
        assert (cfg.train.train_iter, cfg.train.scheduler.max_iter) == (steps, steps)
        assert cfg.train.warmup_iter == cfg.train.scheduler.warmup_iter == -(-steps // 4)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train.start_iter", 5, r"train.start_iter is 5, but the trainer sets it to 0"),
        ("train.samples", 500, r"train.samples is 500, but the trainer sets it to 96"),
        ("dataloader.consumed_samples", 8, r"dataloader.consumed_samples is 8"),
        ("dataloader.train.consumed_samples", 8, r"dataloader.train.consumed_samples is 8"),
        ("dataloader.train.train_batch_size", 4, r"train_batch_size is 4, .*from train.train_micro_batch_size"),
        ("dataloader.train.test_batch_size", 9, r"test_batch_size is 9, .*from train.test_micro_batch_size"),
        ("dataloader.test.0.test_batch_size", 9, r"dataloader.test.0.test_batch_size is 9"),
        ("dataloader.valid", {"a": 1}, r"dataloader.valid"),
    ],
)
def test_what_the_trainer_decides_cannot_be_given_otherwise(tmp_path: Path, key: str, value: Any, message: str) -> None:
    cfg = tiny_config(str(tmp_path))
    OmegaConf.update(cfg, key, value, force_add=True)
    with pytest.raises(ConfigError, match=message):
        built(cfg)


def test_seeds_that_the_config_gives_are_kept(tmp_path: Path) -> None:
    cfg = tiny_config(str(tmp_path), seed=7)
    cfg.dataloader.train.dataset.seed = 3
    default_setup(cfg)
    (train, _, _), (test,) = build_configured_train_loader(cfg), build_configured_test_loaders(cfg)
    assert (train.seed, test.seed) == (7, 7)
    assert (train.dataset.points == TinyDataset(40, seed=3).points).all()
    cfg.dataloader.train.seed, cfg.train.seed = 11, 8
    (train, _, _), (test,) = build_configured_train_loader(cfg), build_configured_test_loaders(cfg)
    assert (train.seed, test.seed) == (11, 8)


class Tokenizing(TinyDataset):
    """Takes a tokenizer."""

    def __init__(self, length: int = 40, tokenizer: Any = None) -> None:
        super().__init__(length)
        self.tokenizer = tokenizer


def upper(text: str) -> str:
    return text.upper()


def lower(text: str) -> str:
    return text.lower()


def new_tokenizer(name: str) -> Any:
    return {"upper": upper, "lower": lower}[name]


def test_the_tokenizer_reaches_the_datasets_that_take_one_and_have_none(tmp_path: Path) -> None:
    cfg = tiny_config(str(tmp_path))
    cfg.tokenization = {"tokenizer": LazyCall(new_tokenizer)(name="upper"), "append_eod": False}
    cfg.dataloader.train.dataset = [
        LazyCall(Tokenizing)(),
        LazyCall(TinyDataset)(length=40),
        LazyCall(Tokenizing)(tokenizer=LazyCall(new_tokenizer)(name="lower")),
        LazyCall(Subset)(dataset=LazyCall(ConcatDataset)(datasets=[LazyCall(Tokenizing)()]), start=0, stop=10),
    ]
    trainer = built(cfg)
    with_it, without, own, around = trainer.train_loader.dataset.datasets
    assert around.dataset.datasets[0].tokenizer is upper
    assert with_it.tokenizer is upper
    assert own.tokenizer is lower
    assert not hasattr(without, "tokenizer")
    cfg.tokenization.tokenizer = "upper"
    with pytest.raises(ConfigError, match=r"tokenization.tokenizer is 'upper'; it must be a LazyCall"):
        DefaultTrainer(cfg)
    cfg.tokenization.tokenizers = None
    with pytest.raises(ConfigError, match=r"tokenization.tokenizers. Did you mean 'tokenizer'"):
        DefaultTrainer(cfg)


@pytest.mark.parametrize(
    ("evaluation", "expected"),
    [
        ({"eval_period": 0, "eval_iter": 3}, [96, 12, 12]),
        ({"eval_period": 5, "eval_iter": 3}, [96, 36, 12]),
        ({"eval_period": 5, "eval_iter": float("inf")}, [96, 3 * 4 * 10**9, 4 * 10**9]),
        ({"eval_period": 5, "eval_iter": 1e9}, [96, 3 * 4 * 10**9, 4 * 10**9]),
    ],
)
def test_odd_evaluation_lengths_reach_train_val_test_num_samples(
    tmp_path: Path, evaluation: dict[str, Any], expected: list[int]
) -> None:
    cfg = tiny_config(str(tmp_path))
    cfg.train.evaluation.update(evaluation)
    cfg.dataloader.train = LazyCall(build_nlp_train_val_test_loader)(
        dataset=LazyCall(TinyDataset)(length=40),
        splits=[[8, 1, 1]],
        weights=None,
        train_val_test_num_samples=None,
        num_workers=0,
    )
    complete_train_config(cfg)
    build_configured_train_loader(cfg)
    assert cfg.dataloader.train.train_val_test_num_samples == expected
    cfg.dataloader.train.train_val_test_num_samples = [1, 2, 3]
    with pytest.raises(ConfigError, match=r"train_val_test_num_samples is \[1, 2, 3\], but the trainer sets it to"):
        build_configured_train_loader(cfg)


ODD_BUT_ALLOWED: list[dict[str, Any]] = [
    {"graph": True, "train_iter": 1},
    {"train_epoch": None, "warmup_ratio": None, "evaluation.eval_period": 0, "evaluation.eval_iter": float("inf")},
    {"train_iter": 0, "train_epoch": 0.3, "checkpointer.max_to_keep": None, "evaluation.eval_iter": 1},
    {"train_iter": None, "train_epoch": 1.0, "checkpointer.stop_signals": [], "evaluation.eval_after_n_epoch": 0},
    {"evaluation.eval_period": 10**9, "log_period": 10**9, "checkpointer.period": 10**9, "train_iter": 2},
    {"checkpointer.save_model_after_n_epoch": 1e-9, "evaluation.eval_after_n_epoch": 1e-9, "train_iter": 2},
    {"checkpointer.stop_signals": None, "load_weight": None, "resume_override": None, "may_differ": None},
    {"seed": 2**32 - 1, "skip_steps": None, "batch_size_schedule": [], "warmup_ratio": 1, "train_iter": 1},
    {"test_micro_batch_size": 1000, "global_batch_size": 40, "train_iter": 1.0},
]


@pytest.mark.parametrize("changes", ODD_BUT_ALLOWED)
def test_a_training_runs_with_odd_values_that_are_allowed(tmp_path: Path, changes: dict[str, Any]) -> None:
    cfg = tiny_config(str(tmp_path), train_iter=3, graph="graph" in changes)
    cfg.graph.global_mode = {}  # In a graph, this is odd too.
    for key in changes.keys() - {"graph"}:
        OmegaConf.update(cfg, f"train.{key}", changes[key])
    trainer = built(cfg)
    results = trainer.train()
    assert trainer.iter == trainer.max_iter >= 1
    assert "Acc@1" in results


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_iter": 0}, r"train.train_iter is 0 and train.train_epoch 0: there is nothing to train"),
        ({"global_batch_size": None}, r"neither train.train_micro_batch_size nor train.global_batch_size"),
        ({"train_epoch": 1e9}, None),
        ({"computed": []}, r"train.computed is \[\]; it must be what a trainer wrote"),
        ({"scheduler.warmup_factor": float("nan")}, r"warmup_factor is nan"),
        ({"scheduler.warmup_method": "cubic"}, r"warmup_method is 'cubic'"),
        ({"scheduler.max_iter": 0}, r"train.scheduler"),
        ({"scheduler.alpha": float("nan")}, r"alpha is nan"),
        ({"skip_steps": 0}, r"train.skip_steps is 0"),
        ({"batch_size_schedule": {}}, r"train.batch_size_schedule is {}"),
        ({"scheduler.max_iter": 1.5}, r"max_iter is 1.5"),
        ({"scheduler.alpha": "x"}, r"train.scheduler"),
        ({"skip_steps": [[2, 1]]}, r"train.skip_steps has \[2, 1\]"),
        ({"skip_steps": 5}, r"train.skip_steps is 5"),
        ({"batch_size_schedule": [[0, 0]]}, r"train.batch_size_schedule is"),
        ({"resume_override": ["sed"]}, r"resume_override names 'sed'.* Did you mean 'seed'"),
        (
            {"early_stopping.metric": "loss"},
            r"metric is 'loss', but train.early_stopping.patience is None",
        ),
        ({"early_stopping.mode": "min"}, r"early_stopping.mode is 'min', but train.early_stopping.patience is None"),
        ({"early_stopping.min_delta": 0.5}, r"early_stopping.min_delta is 0.5, but train.early_stopping.patience is"),
        (
            {"load_weight_may_differ": ["head.*"]},
            r"_may_differ is \['head.\*'\], but train.load_weight is ''",
        ),
        ({"checkpointer.stop_signals": ["SIGTREM"]}, r"train.checkpointer.stop_signals has 'SIGTREM'"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str | None
) -> None:
    cfg = tiny_config(str(tmp_path))
    for key, value in changes.items():
        OmegaConf.update(cfg, f"train.{key}", value, force_add=True)
    if message is None:
        assert built(cfg).max_iter == 5 * 10**9
        return
    with pytest.raises(ConfigError, match=message):
        built(cfg)


def test_a_key_of_a_graph_that_is_not_enabled_is_refused(tmp_path: Path) -> None:
    cfg = tiny_config(str(tmp_path))
    cfg.graph.debug = 0
    with pytest.raises(ConfigError, match=r"graph.debug is 0, but graph.enabled is False, and without it the key has"):
        built(cfg)


def test_keys_without_effect_are_warned_of(tmp_path: Path) -> None:
    cfg = tiny_config(str(tmp_path))
    cfg.train.zero_optimization.stage, cfg.graph.auto_parallel.sbp_collector = 2, True
    cfg.train.evaluation.eval_metric = "loss"
    del cfg.dataloader["test"]
    built(cfg)
    log = (tmp_path / "log.txt").read_text()
    for said in (
        "train.zero_optimization.stage is 2, but train.zero_optimization.enabled is not True, so it has no effect.",
        "graph.auto_parallel.sbp_collector is True, but graph.auto_parallel.enabled is not True, so it has no effect.",
        "no evaluation, and train.evaluation.eval_period, train.evaluation.eval_metric have no effect.",
    ):
        assert log.count(said) == 1, said


def test_a_divisor_of_the_vocabulary_that_nothing_uses_is_refused(tmp_path: Path) -> None:
    cfg = tiny_config(str(tmp_path))
    cfg.tokenization = {"tokenizer": LazyCall(new_tokenizer)(name="upper"), "make_vocab_size_divisible_by": 64}
    with pytest.raises(ConfigError, match=r"divisible_by is 64, but it has no effect: it needs the key model.cfg"):
        built(cfg)


class Embeds(TinyModel):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()


class Words(list):
    def __init__(self, count: int) -> None:
        super().__init__(f"word{number}" for number in range(count))


def test_a_model_with_fewer_embeddings_than_the_tokenizer_has_tokens_is_refused(tmp_path: Path) -> None:
    cfg = tiny_config(str(tmp_path))
    cfg.model, cfg.tokenization = LazyCall(Embeds)(vocab_size=10), {"tokenizer": LazyCall(Words)(count=11)}
    with pytest.raises(ConfigError, match=r"model.vocab_size is 10, but the tokenizer has 11 tokens. Set it to 11 or"):
        built(cfg)


CALLS = ("model", "optim", "optim.params", "train.scheduler", "graph.train_graph", "dataloader", "dataloader.train")


@pytest.mark.parametrize("value", ["x", {"a": 1}, "${no.such.key}", *map(slowly, (5, ["x"], int))])
@pytest.mark.parametrize("key", [*CALLS, "train.evaluation.evaluator", "dataloader.test.0", "model._target_"])
def test_what_is_no_lazy_call_is_refused_by_its_key(tmp_path: Path, key: str, value: Any) -> None:
    cfg = tiny_config(str(tmp_path), graph=key.startswith("graph"))
    OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    with pytest.raises(ConfigError, match=key.split("._target_")[0]):
        built(cfg)


@pytest.mark.parametrize("key", ["lr", "weight_decay", "betas", "eps", "params.clip_grad_max_norm"])
@pytest.mark.parametrize("value", [-1, None, *map(slowly, ("x", float("nan")))])
def test_odd_values_of_the_optimizer_name_it_or_train(tmp_path: Path, key: str, value: Any) -> None:
    cfg = tiny_config(str(tmp_path), train_iter=1, stop_on_nonfinite_loss=False)
    OmegaConf.update(cfg, f"optim.{key}", value, force_add=True)
    try:
        built(cfg).train()
    except ConfigError as error:
        assert "optim" in str(error)
