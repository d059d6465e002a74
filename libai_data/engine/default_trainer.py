"""The trainer that a config describes: a subclass can override the method that builds each part."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from itertools import chain, count
from typing import Any, Callable

from libai_data.config import check_keys, instantiate, try_get_key
from libai_data.config.values import require
from libai_data.data.attributes import call_if_there
from libai_data.data.datasets.class_numbers import ClassNumbers
from libai_data.delivery import check_forward_fields, to_global
from libai_data.engine.batches import mixed_up
from libai_data.engine.built_parts import as_test_loaders, as_three_loaders, built_by, built_evaluator, check_fit
from libai_data.engine.checkpoint import Checkpointer
from libai_data.engine.checkpoint.folder import CheckpointFolder
from libai_data.engine.checkpoint.random_state import seed_modules
from libai_data.engine.data_state import (
    OVERRIDE_KEY,
    DataState,
    PlainState,
    check_step,
    has_state,
    stream_state_of,
    warn_of_other_reads,
)
from libai_data.engine.datamodule.data_stages import DataStages
from libai_data.engine.default_hooks import default_hooks
from libai_data.engine.evaluation import inference_on_dataset, print_csv_format
from libai_data.engine.evaluation.inference import Evaluators, module_of
from libai_data.engine.hooks import EvalHook, LRScheduler
from libai_data.engine.loaders import build_configured_test_loaders, build_configured_train_loader, scale_to_epochs
from libai_data.engine.logging_setup import setup_logger
from libai_data.engine.losses import samples_in_words
from libai_data.engine.models import (
    build_configured_graph,
    build_configured_model,
    build_configured_tokenizer,
    required_section,
)
from libai_data.engine.optim import build_optimizer
from libai_data.engine.output_folder import release_output_folder, take_output_folder
from libai_data.engine.parts_as_built import PartsAsBuilt
from libai_data.engine.running_stages import RunsStages, get_batch_of, stages_of
from libai_data.engine.scheduler import ScheduleState, build_lr_scheduler
from libai_data.engine.setup import complete_train_config
from libai_data.engine.step_plan import step_plan
from libai_data.engine.step_trainers import EagerTrainer, GraphTrainer
from libai_data.engine.token_count import TokenCounter
from libai_data.engine.train_loop import HookBase, TrainerBase
from libai_data.engine.writers import CommonMetricPrinter, EventWriter, JSONWriter, TensorboardXWriter
from libai_data.errors import ConfigError
from libai_data.iterables.iterable_loader import indexed_dataset_of
from libai_data.mesh.current import get_data_parallel_size, get_rank, synchronize

logger = logging.getLogger(__name__)


class DefaultTrainer(RunsStages, TrainerBase):
    """Trains what a config describes, as LiBai's `DefaultTrainer` does.

    ::

        cfg = LazyConfig.load("config.py")
        default_setup(cfg, args)
        seed_all(cfg.train.seed)  # else, the first weights differ in each run
        trainer = DefaultTrainer(cfg)
        trainer.train()

    To change a part, override its method. `build_train_loader` may return any iterable; then `get_batch` makes the
    model's arguments from its batches.

    Args:
        cfg: the whole config, after `default_setup`.
        datamodule: a `DataModule` or LightningDataModule. Its loaders are used instead of the loaders of the config. By
            default `cfg.datamodule`.

    Attributes:
        model, optimizer, lr_scheduler, train_loader: as built.
        test_loader: list of test loaders.
        graph_train, graph_eval: the graphs, in graph mode.
        checkpointer: saves and restores.
        data: the stages of the data module; None without one.
    """

    def __init__(self, cfg: Any, datamodule: Any = None) -> None:
        super().__init__()
        self.cfg = cfg
        if not logging.getLogger("libai_data").handlers:
            setup_logger(rank=get_rank())
        complete_train_config(cfg)
        self.tokenizer = built_by(self, "build_tokenizer", cfg)
        self.data = stages_of(cfg, datamodule)
        if self.data is None and self._builds_configured_loaders():
            known = dict.fromkeys(("train", "test", "consumed_samples"))
            check_keys(try_get_key(cfg, "dataloader", default={}), known, "dataloader")
        folder = CheckpointFolder(cfg.train.output_dir)
        folder.recover()
        resume = try_get_key(cfg, "train.resume", default=False)
        self._resumed_from = folder.checkpoint_to_resume() if resume else ""
        saved = folder.read(self._resumed_from) if self._resumed_from else {}
        self._saved_states: dict[str, Any] = saved.get("stateful", {})
        self.start_iter = saved["iteration"] + 1 if saved else 0
        require(cfg, "train.start_iter", self.start_iter, "the checkpoint that it resumes from", default=0)
        self._plan = step_plan(cfg)
        # LiBai's overridden `build_train_loader`s read this; loaders of this package are restored by their state.
        consumed = self._plan.schedule.position_of(self.start_iter)
        require(cfg, "dataloader.consumed_samples", consumed, "the checkpoint that it resumes from", default=0)
        self.test_loader: list[Any] = []
        if self.data is None:
            self.train_loader, *others = as_three_loaders(built_by(self, "build_train_loader", cfg, self.tokenizer))
            self.test_loader += [loader for loader in others if loader is not None]
            self.test_loader += as_test_loaders(built_by(self, "build_test_loader", cfg, self.tokenizer))
        else:
            self.data.datamodule.trainer = weakref.proxy(self)
            self.data.enter("fit")
            (self.train_loader,) = self.data.loaders("train")
            self.test_loader += self.data.loaders("val")
        self._classes = ClassNumbers(map(indexed_dataset_of, [self.train_loader, *self.test_loader]))
        self._plan.check_rows_of(self.train_loader)
        follows = self._plan.followed_by(self.train_loader)
        self._data_state = DataState(self.train_loader, try_get_key(cfg, OVERRIDE_KEY) or ())
        if saved:
            # Before anything costly is built, because a checkpoint of another stream raises an error here.
            self._data_state.load_state_dict(saved["stateful"].get("train_loader"))
            if follows:
                check_step(stream_state_of(self.train_loader), self.start_iter, "the checkpoint")
        self.auto_scale_hyperparams(cfg, self.train_loader)
        self._has_warned, self._use = False, ""  # that other code reads the train loader; `Taken.use` of the last call
        self.max_iter, self.global_batch_size = cfg.train.train_iter, cfg.train.global_batch_size

        synchronize()
        self.model = built_by(self, "build_model", cfg)
        self.optimizer = built_by(self, "build_optimizer", cfg, self.model)
        self.lr_scheduler = built_by(self, "build_lr_scheduler", cfg, self.optimizer)
        check_fit(self.model, self.optimizer, self.lr_scheduler)
        seed_modules(self.model, cfg.train.seed)
        self.tokens = TokenCounter(self.train_loader)
        self.graph_train: Any = None
        self.graph_eval: Any = None
        if try_get_key(cfg, "graph.enabled", default=False):
            train_parts = (self.optimizer, self.lr_scheduler)
            self.graph_train = built_by(self, "build_graph", cfg, self.model, *train_parts, is_train=True)
            self.graph_eval = built_by(self, "build_graph", cfg, self.model, is_train=False)
        self._parts = PartsAsBuilt(self)
        self._trainer = self._build_step_trainer()
        self.checkpointer = self._build_checkpointer()
        self.checkpointer.sound.update(folder.sound)
        self.resume_or_load(resume)
        self.register_hooks(built_by(self, "build_hooks"))
        if self._resumed_from.endswith("_final") and not any(
            isinstance(hook, EvalHook) and hook.was_missed(self.start_iter - 1) for hook in self._hooks
        ):
            self.ended_at = self.start_iter

    def resume_or_load(self, resume: bool = True) -> None:
        """Continue from the last checkpoint in `train.output_dir`, or start with the weights of `train.load_weight`."""
        if resume and self._resumed_from:
            self.checkpointer.load(self._resumed_from)
        if not self._resumed_from and self.cfg.train.load_weight:
            may_differ = self.cfg.train.load_weight_may_differ
            self.checkpointer.load_weights(self.cfg.train.load_weight, ("*",) if may_differ is None else may_differ)

    def train(self, start_iter: int | None = None, max_iter: int | None = None) -> dict[str, Any]:
        """Train to the end.

        Args:
            start_iter: by default where the last checkpoint or call ended, or 0; CheckpointError if it ended in a step.
            max_iter: by default the end of the last call, or `train.train_iter`.

        Returns:
            Results of the last evaluation; {} without evaluation.
        """
        self._parts.check()
        if start_iter is None:
            self._data_state.check_finished(self.checkpointer.last_step)
        start = (self.checkpointer.last_step + 1 or self.start_iter) if start_iter is None else start_iter
        end = self.max_iter if max_iter is None else max_iter
        self._last_eval_results: dict[str, Any] = {}
        try:
            if start > end or start == end == self.ended_at:
                logger.info(
                    f"All {end} steps are done already. To continue, set train.train_iter or max_iter higher. To "
                    "repeat the last evaluation, use --eval-only --resume."
                )
                return {}
            self._use = take_output_folder(self.cfg.train.output_dir, resume=True, last_use=self._use).use
            self._data_state.begin()
            super().train(start, end)
        finally:
            release_output_folder(self.cfg.train.output_dir)
        if max_iter is None or end >= self.cfg.train.train_iter:  # Else, another call makes the other steps.
            for loader in self.test_loader:
                call_if_there(loader, "close")
            self._data_state.close()
            if self.data is not None:
                self.data.leave("fit")
        return self._last_eval_results

    def register_hooks(self, hooks: Iterable[HookBase | None]) -> None:
        """Add hooks. `LRScheduler` hooks are called first, so that any other hook can save a checkpoint.

        Checkpoints store the state of hooks with `state_dict` and `load_state_dict`, under their class: that of each
        rank if there are as many ranks as before, otherwise that of rank 0.

        Raises:
            TypeError: An item is not a hook, or a checkpoint cannot store its state.
        """
        hooks = list(hooks)
        super().register_hooks(hooks)
        self._hooks.sort(key=lambda hook: not isinstance(hook, LRScheduler))
        for hook in filter(has_state, hooks):
            name = _new_name(f"hook {type(hook).__name__}", self.checkpointer.stateful)
            state = PlainState(hook)
            state.check(name)
            self.checkpointer.stateful[name] = state
            if name in self._saved_states:
                state.load_state_dict(self._saved_states[name])

    def run_step(self) -> None:
        self._trainer.iter, self._trainer.max_iter = self.iter, self.max_iter
        self._trainer.grad_acc_steps = self._plan.micro_batches_of(self.iter)
        get_batch = self.get_batch if self.data is None else get_batch_of(self.data)
        self._trainer.run_step(get_batch, self.cfg.train.input_placement_device)

    def after_step(self) -> None:
        self.checkpointer.last_step, self._trainer.inputs.taken = self.iter, 0
        if self.iter == self.start_iter or self.ends_period(self.cfg.train.log_period):
            self._parts.warn_of_unsaved(self._hooks)
            self._has_warned = self._has_warned or warn_of_other_reads(self._data_state.loader, self.iter + 1)
        super().after_step()

    def build_hooks(self) -> list[HookBase | None]:
        """Hooks for timing, learning rate, checkpoints, evaluation, best checkpoint, writing, stopping on a signal."""
        return default_hooks(self)

    def build_writers(self) -> list[EventWriter]:
        """Writers of rank 0: log lines (if no live bar is shown), `metrics.json`, TensorBoard events."""
        folder = self.cfg.train.output_dir
        files = [JSONWriter(f"{folder}/metrics.json", self.start_iter), TensorboardXWriter(folder, self.start_iter)]
        return [CommonMetricPrinter(self.max_iter), *files]

    @classmethod
    def get_batch(
        cls, data: Any, input_placement_device: str = "cuda", mixup_func: Callable[..., Any] | None = None
    ) -> dict[str, Any]:
        """Make the model's arguments from a batch: global tensors, with the layouts of their fields.

        Overriding methods may also have the parameters (data, mixup_func=None) or only (data).

        Args:
            data: an Instance of this rank's local tensors [rows of this rank, ...].
            input_placement_device: "cuda" or "cpu"; without a GPU, "cpu" is used.
            mixup_func: a function of (images, labels), this rank's local tensors, that returns both.

        Returns:
            Field name -> global tensor.
        """
        return to_global(mixed_up(data, mixup_func, input_placement_device), device_type=input_placement_device)

    @classmethod
    def build_tokenizer(cls, cfg: Any) -> Any:
        """Build `cfg.tokenization.tokenizer`, and set the model's padded vocabulary size; None without this section."""
        return build_configured_tokenizer(cfg)

    @classmethod
    def build_model(cls, cfg: Any) -> Any:
        """Build `cfg.model`, with global tensors as parameters."""
        return build_configured_model(cfg)

    @classmethod
    def build_graph(
        cls, cfg: Any, model: Any, optimizer: Any = None, lr_scheduler: Any = None, is_train: bool = True
    ) -> Any:
        """Build `cfg.graph.train_graph` or `cfg.graph.eval_graph`."""
        return build_configured_graph(cfg, model, optimizer, lr_scheduler, is_train)

    @classmethod
    def build_optimizer(cls, cfg: Any, model: Any) -> Any:
        """Build `cfg.optim`, for the parameters of the model."""
        return build_optimizer(required_section(cfg, "optim", "build_optimizer"), model)

    @classmethod
    def build_lr_scheduler(cls, cfg: Any, optimizer: Any) -> Any:
        """Build `cfg.train.scheduler`."""
        return build_lr_scheduler(required_section(cfg, "train.scheduler", "build_lr_scheduler"), optimizer)

    @classmethod
    def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> Any:
        """Build `cfg.dataloader.train`: (train, validation, test) loaders; validation and test may be None.

        Overriding methods may return only a train loader.
        """
        return build_configured_train_loader(cfg, tokenizer)

    @classmethod
    def build_test_loader(cls, cfg: Any, tokenizer: Any = None) -> list[Any]:
        """Build `cfg.dataloader.test`, a list of loaders."""
        return build_configured_test_loaders(cfg, tokenizer)

    @classmethod
    def auto_scale_hyperparams(cls, cfg: Any, data_loader: Any) -> None:
        """Convert the epochs of the config into steps."""
        scale_to_epochs(cfg, data_loader)

    @classmethod
    def build_evaluator(cls, cfg: Any) -> Any:
        """Build `cfg.train.evaluation.evaluator`."""
        return instantiate(try_get_key(cfg, "train.evaluation.evaluator"))

    @classmethod
    def test(
        cls,
        cfg: Any,
        test_loaders: Iterable[Any],
        model: Any,
        evaluator: Evaluators = None,
        data: DataStages | None = None,
    ) -> dict[str, Any]:
        """Evaluate a model on test loaders.

        Args:
            cfg: the whole config.
            test_loaders: loaders that end after one pass.
            model: a module, or a graph for evaluation.
            evaluator: by default, what `build_evaluator` returns.
            data: the stages of the data module that has the loaders; by default, `get_batch` makes the inputs.

        Returns:
            The results, on every rank; with several loaders, by the name of each dataset.
        """
        if next(iter(inspect.signature(cls.get_batch).parameters), "") == "self":
            raise ConfigError(f"evaluations call {cls.__name__}.get_batch on the class; write @classmethod before it")
        evaluator = built_evaluator(cls, cfg) if evaluator is None else evaluator
        forward = module_of(model).forward
        results: dict[str, Any] = OrderedDict()
        for number, loader in enumerate(test_loaders):
            loader_name = getattr(loader, "dataset_name", None) or type(getattr(loader, "dataset", loader)).__name__
            name = _new_name(loader_name, results)
            results[name] = inference_on_dataset(
                model,
                loader,
                cfg.train.test_micro_batch_size * get_data_parallel_size(),
                cfg.train.evaluation.eval_iter,
                cls.get_batch if data is None else get_batch_of(data, number),
                cfg.train.input_placement_device,
                evaluator,
                check_inputs=partial(check_forward_fields, forward),
            )
            print_csv_format(results[name], name)
        return next(iter(results.values())) if len(results) == 1 else results

    @classmethod
    def _builds_configured_loaders(cls) -> bool:
        methods = ("build_train_loader", "build_test_loader")
        return all(inspect.getattr_static(cls, name) is vars(DefaultTrainer)[name] for name in methods)

    def _evaluate(self) -> dict[str, Any]:
        with self._running("validate"):
            self._last_eval_results = self._test_on(self.test_loader)
        return self._last_eval_results

    def _build_step_trainer(self) -> Any:
        loader = self._data_state.loader
        check_inputs = partial(self._plan.check_inputs, self.model.forward, loader)
        steps = self._plan.micro_batches_of(self.start_iter)
        if self.graph_train is not None:
            trainer: Any = GraphTrainer(self.graph_train, loader, steps, check_inputs)
        else:
            trainer = EagerTrainer(self.model, loader, self.optimizer, steps, check_inputs)
        train, trainer.on_inputs = self.cfg.train, self.tokens.add
        # Hooks also read the losses before each checkpoint and evaluation.
        trainer.losses.period = train.log_period
        trainer.losses.stop_on_nonfinite = train.stop_on_nonfinite_loss
        trainer.losses.samples_of = partial(samples_in_words, loader)
        self.losses, self._data_state.inputs = trainer.losses, trainer.inputs
        return trainer

    def _build_checkpointer(self) -> Checkpointer:
        stateful: dict[str, Any] = {
            "lr_scheduler": ScheduleState(self.lr_scheduler),
            "train_loader": self._data_state,
            "tokens": self.tokens,
            "classes": self._classes,
        }
        if self.data is not None and has_state(self.data.datamodule):
            stateful["datamodule"] = PlainState(self.data)
        folder = self.cfg.train.output_dir
        return Checkpointer(self.model, folder, optimizer=self.optimizer, graph=self.graph_train, **stateful)


def _new_name(name: str, taken: Iterable[str]) -> str:
    names = (f"{name}_{number}" for number in count(2))
    return next(each for each in chain([name], names) if each not in taken)
