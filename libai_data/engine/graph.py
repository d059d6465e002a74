"""The `nn.Graph` around a model, for training and for evaluation."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import oneflow as flow
from oneflow import nn

from libai_data.data.nesting import Skeleton, is_texts, put_together, taken_apart
from libai_data.engine.batches import part_inputs
from libai_data.engine.losses import mean_of, total_loss
from libai_data.engine.model_as_built import ModelAsBuilt
from libai_data.engine.tracing import checking_what_is_lost, warning_of_draws
from libai_data.errors import ConfigError, SchemaError
from libai_data.mesh.arrays import is_flow_tensor
from libai_data.mesh.current import get_data_parallel_size, get_mesh

logger = logging.getLogger(__name__)


class GraphBase(nn.Graph):
    """Compiles a model, and in training its optimizer and LR schedule, into one static graph. LiBai's arguments.

    In training, the inputs must keep their names, shapes and dtypes from call to call, and the model's parts their
    `training` and `requires_grad`; otherwise, a call raises SchemaError or ConfigError. In evaluation, the model itself
    runs other batches than these, and with other modes, parts or numbers, in eager mode.

    Args:
        model: returns a dict; in training, the sum of the outputs with "loss" in their names is minimised.
        lr_scheduler: for training; the graph steps it.
        fp16: mixed precision with dynamic loss scaling; on GPUs only.
        activation_checkpoint: recompute activations in the backward pass; the model's class must have LiBai's
            `set_activation_checkpoint(model)`.
        grad_acc_steps: micro-batches of a step. On GPUs, the graph splits its inputs into micro-batches along dim 0.
            On the CPU, each micro-batch has its own arguments (`takes_micro_batches`).
        zero_optim: shard the optimizer's state over the data axis; on GPUs only.
        zero_stage: 1, 2 or 3.
        auto_parallel_conf: `cfg.graph.auto_parallel`.
        global_mode: `cfg.graph.global_mode`.
        device: where `global_mode` places tensors; the mesh's device by default.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        fp16: bool = False,
        activation_checkpoint: bool = False,
        grad_acc_steps: int = 1,
        zero_optim: bool = False,
        zero_stage: int = 0,
        is_train: bool = True,
        auto_parallel_conf: Any = None,
        global_mode: Any = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        _complete_names(self.model)
        self.is_train = is_train
        self.global_mode = global_mode
        self.device = device or get_mesh().device_type
        # On the CPU, OneFlow 0.9 accumulates wrong gradients, different ones in each run. One backward pass of the mean
        # loss is correct, but keeps the activations of all micro-batches in memory.
        self.takes_micro_batches = is_train and grad_acc_steps > 1 and self.device != "cuda"
        self._grad_acc_steps = grad_acc_steps
        # Of the inputs that the graph is compiled for: how they are nested, and their shapes and dtypes.
        self._skeleton: Skeleton = {}
        self._forms: dict[str, Any] = {}
        self._model_as_built = ModelAsBuilt(model)
        self._has_begun = False  # the compilation
        if is_train:
            _check_is_compiled(optimizer)
            _check_is_compiled(lr_scheduler)
            _check_clips(optimizer)
            _check_dtypes(model)
            self.add_optimizer(optimizer, lr_sch=lr_scheduler)
            if fp16 and self._needs_gpu("train.amp"):
                self.config.enable_amp(True)
                self.set_grad_scaler(
                    flow.amp.GradScaler(init_scale=65536.0 * get_data_parallel_size(), growth_interval=2000)
                )
            if grad_acc_steps > 1 and not self.takes_micro_batches:
                self.config.set_gradient_accumulation_steps(grad_acc_steps)
            if activation_checkpoint:
                self._call_on_model("set_activation_checkpoint")
            if zero_optim and self._needs_gpu("train.zero_optimization"):
                self.config.enable_zero(True, stage=zero_stage)
            self._call_on_model("set_pipeline_stage_id")
        self.config.allow_fuse_add_to_output(True)
        self.config.allow_fuse_model_update_ops(True)
        self.config.allow_fuse_cast_scale(True)
        mesh = get_mesh()
        if self.device == "cuda" and mesh.tensor_parallel_size * mesh.pipeline_parallel_size > 1:
            # One stream for both computation and communication needs less memory.
            flow.boxing.nccl.enable_use_compute_stream(True)
        if auto_parallel_conf is not None and auto_parallel_conf.enabled:
            self._enable_auto_parallel(auto_parallel_conf)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph; the first call compiles it, and starts the threads that will run it."""
        leaves: dict[str, Any] = {}
        skeleton = taken_apart(kwargs, leaves)
        for name, value in leaves.items():
            if value is not None and not is_flow_tensor(value):
                what = "text" if is_texts(value) else f"a {type(value).__name__}"
                raise SchemaError(
                    f"'{name}' is {what}, but the inputs of a graph are tensors. Let get_batch make a tensor of it. "
                    "Select the other fields (the loader's argument fields, or get_batch), or set graph.enabled=False"
                )
        if self._has_begun and not self._is_compiled:
            raise ConfigError(
                f"the compilation of this graph ({self.name}) has failed before, and OneFlow cannot repeat it. Make a "
                "new trainer, or a new graph, after you have removed the cause of the first error"
            )
        forms = {name: None if value is None else (tuple(value.shape), value.dtype) for name, value in leaves.items()}
        if not self._forms:
            self._model_as_built.begin()
            self._skeleton, self._forms = skeleton, forms
        difference, changed = self._model_as_built.difference(), self._model_as_built.changed_number()
        if not self.is_train and (difference or changed or forms != self._forms):
            return self.model.to(nn.Module)(*args, **kwargs)
        if difference:
            raise ConfigError(difference)
        if forms != self._forms:
            raise SchemaError(_difference(forms, self._forms))
        if changed:
            self._model_as_built.forget_numbers()
            logger.warning("%s. To train with the new value, set graph.enabled=False.", changed)
        # OneFlow gives a compiled graph its inputs by their order, not by their names.
        kwargs = put_together(self._skeleton, lambda leaf: leaves[leaf.path])
        with nullcontext() if self._is_compiled or self.device == "cuda" else _without_preemption():
            try:
                return super().__call__(*args, **kwargs)
            except TypeError as error:
                if not str(error).startswith("super("):
                    raise
                raise ConfigError(
                    "forward calls super(), but in a graph, `self` is OneFlow's stand-in for the model. Name the class "
                    "instead, as in Parent.forward(self, x), or set graph.enabled=False"
                ) from error

    def build(self, **inputs: Any) -> dict[str, Any]:
        """Trace the model; OneFlow calls this once."""
        self._has_begun = True
        logger.info("Compiling the %s graph; this can take a while.", "training" if self.is_train else "evaluation")
        if not self.is_train:
            with warning_of_draws():
                return self.model(**inputs)
        with self._global_mode(), checking_what_is_lost(self):
            if self.takes_micro_batches:
                outputs = self._train_on_all(inputs)
            else:
                outputs = self.model(**inputs)
                total_loss(outputs).backward()
        return outputs

    def _train_on_all(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """One backward pass of the mean loss of all micro-batches."""
        count = self._grad_acc_steps
        for name, module in self.model.to(nn.Module).named_modules(prefix="model"):
            if module.training and getattr(module, "running_mean", None) is not None:
                raise ConfigError(
                    f"{name} has running statistics, which a CPU graph cannot update for several micro-batches. Set "
                    "train.num_accumulation_steps=1 or graph.enabled=False"
                )
        outputs = [self.model(**each) for each in part_inputs(inputs, count)]
        sum(total_loss(each) / count for each in outputs).backward()
        shown = [name for name, value in outputs[0].items() if value is not None]
        return {name: sum(mean_of(each[name]) for each in outputs) / count for name in shown}

    def _global_mode(self) -> AbstractContextManager[Any]:
        if self.global_mode is None or not self.global_mode.enabled:
            return nullcontext()
        from oneflow.utils.global_view import global_mode

        return global_mode(True, placement=flow.env.all_device_placement(self.device), sbp=flow.sbp.split(0))

    def _needs_gpu(self, what: str) -> bool:
        if self.device != "cuda":
            raise ConfigError(f"{what}.enabled is True, but it works on GPUs only. Set {what}.enabled=False.")
        return True

    def _call_on_model(self, method: str) -> None:
        """Call a static method of the model's class with the graph's proxy of the model, as LiBai's models require."""
        model_class = type(self.model.to(nn.Module))
        if hasattr(model_class, method):
            getattr(model_class, method)(self.model)
        elif method == "set_activation_checkpoint":
            raise ConfigError(
                f"train.activation_checkpoint.enabled is True, but {model_class.__name__} has no static method "
                f"{method}(model). Write it, or set train.activation_checkpoint.enabled=False."
            )

    def _enable_auto_parallel(self, conf: Any) -> None:
        self.config.enable_auto_parallel(True)
        self.config.enable_auto_parallel_ignore_user_sbp_config(conf.enable_auto_parallel_ignore_user_sbp_config)
        self.config.enable_auto_parallel_trunk_algo(conf.trunk_algo)
        self.config.enable_auto_parallel_sbp_collector(conf.sbp_collector)


def _complete_names(proxy: Any) -> None:
    """Let a graph's proxy of a module know each parameter and buffer by all its names; OneFlow 0.9 knows the first."""
    module = proxy.to(nn.Module)
    for own, known in ((module._parameters, proxy._parameters), (module._buffers, proxy._buffers)):
        first = {id(own[name]): part for name, part in known.items()}
        known.update({name: first[id(part)] for name, part in own.items() if id(part) in first})
    for child in proxy._modules.values():
        _complete_names(child)


def _check_is_compiled(part: Any) -> None:
    """Raise ConfigError if the class of an optimizer or schedule computes its steps in Python: a graph never does."""
    for each in getattr(part, "schedulers", []):
        _check_is_compiled(each)
    kind = next((each for each in type(part).__mro__ if vars(each).keys() & {"step", "clip_grad", "get_lr"}), None)
    if kind is not None and "_generate_conf_for_graph" not in vars(kind):
        raise ConfigError(
            f"a graph cannot run {kind.__name__}, because the class computes its steps in Python. Use an optimizer or "
            "schedule of OneFlow that works in graphs, or set graph.enabled=False"
        )


def _check_clips(optimizer: Any) -> None:
    """Raise ConfigError for the only optimizer whose operator of OneFlow 0.9 cannot scale clipped gradients."""
    if isinstance(optimizer, flow.optim.Adadelta) and any(each._enable_clip_grad for each in optimizer.param_groups):
        raise ConfigError(
            "a graph cannot clip the gradients of Adadelta. Leave out clip_grad_max_norm and clip_grad_norm_type, or "
            "set graph.enabled=False"
        )


def _check_dtypes(model: Any) -> None:
    """Raise ConfigError for parameters of float64, whose gradients OneFlow 0.9 makes of float32."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == flow.float64:
            raise ConfigError(f"a graph cannot train '{name}' of float64. Make it float32, or set graph.enabled=False")


def _difference(forms: dict[str, Any], compiled: dict[str, Any]) -> str:
    """How inputs differ from those that a graph is compiled for, as the text of an error."""
    remedy = "Let get_batch return the same inputs in each step, or set graph.enabled=False"
    if forms.keys() != compiled.keys():
        return f"the inputs are {sorted(forms)}, but the graph is compiled for {sorted(compiled)}. {remedy}"
    name, now, before = next((name, form, compiled[name]) for name, form in forms.items() if form != compiled[name])
    what = f"'{name}' is"
    if now is None or before is None:
        now, before = ("None" if each is None else "a tensor" for each in (now, before))
    elif now[0] == before[0]:
        now, before, remedy = now[1], before[1], "Make the dtypes equal"
    else:
        what, now, before = f"'{name}' has the shape", now[0], before[0]
        remedy = (
            "Make all batches equal: leave out a smaller last batch (drop_last=True), or fill it (ends='cycle' or "
            "'pad'); or set graph.enabled=False"
        )
    return f"{what} {now}, but the graph is compiled for {before}. {remedy}"


@contextmanager
def _without_preemption() -> Iterator[None]:
    """Let threads that start in the block wait for a free core, instead of preempting the thread that wakes them.

    OneFlow 0.9 starts a graph's job, and only then adds an entry to a queue; the job's end removes the entry. If the
    job ends earlier, the queue is empty, and the process crashes, then or later. Of 6 runs of 5,000 calls of a tiny
    graph on 2 idle cores, 5 crashed, and 1 with this function. A step of some milliseconds is not affected.
    """
    before = os.sched_getscheduler(0)
    if before != os.SCHED_OTHER:
        yield
        return
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))
