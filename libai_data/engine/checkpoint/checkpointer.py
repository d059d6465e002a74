"""Saves and restores a training: weights, optimizer, schedule, data, random states."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

from libai_data.data.attributes import call_if_there
from libai_data.engine.checkpoint import optimizer_state
from libai_data.engine.checkpoint.changed_attributes import changed_in_model, changed_in_optimizer
from libai_data.engine.checkpoint.directory import PendingDirectory
from libai_data.engine.checkpoint.folder import STATE, CheckpointFolder, check_name, read_json
from libai_data.engine.checkpoint.placement import fill, whole_on_rank0
from libai_data.engine.checkpoint.random_state import RandomStates
from libai_data.engine.checkpoint.tensor_file import TensorFile, tensor_header, write_tensor
from libai_data.engine.data_state import of_all_ranks
from libai_data.engine.running_statistics import average_statistics
from libai_data.errors import CheckpointError, nearest
from libai_data.mesh.current import broadcast_py_object, get_mesh, is_main_process

logger = logging.getLogger(__name__)

_MODEL = "model.safetensors"
_OPTIMIZER = "optimizer.safetensors"
_RANDOM = "random.json"
_OF_MODEL, _OF_OPTIMIZER = "attributes of the model", "attributes of the optimizer"
_SHOWN = 50


class Checkpointer(CheckpointFolder):
    """Writes the state of a training into directories below `save_dir`, and restores it on any mesh.

    Rank 0 writes whole tensors, one after the other. Each rank reads only its own parts. All methods are
    collective: every rank calls them, and every rank gets the same error.

    Args:
        model: a `oneflow.nn.Module`; in graph mode, the module of the graph.
        save_dir: the folder of the checkpoints, on a file system that all ranks share.
        save_to_disk: False makes `save` do nothing.
        optimizer: the eager optimizer, to save its state.
        graph: the training graph, in graph mode.
        stateful: further objects with `state_dict()`, which returns JSON values, and `load_state_dict(state)`.

    Attributes:
        last_step: index of the last finished step, which a trainer sets after each step, and `load` restores.
    """

    def __init__(
        self,
        model: Any,
        save_dir: str = "",
        *,
        save_to_disk: bool = True,
        optimizer: Any = None,
        graph: Any = None,
        **stateful: Any,
    ) -> None:
        super().__init__(save_dir)
        self.model = model
        self.save_to_disk = save_to_disk
        self.optimizer = optimizer
        self.graph = graph
        self.stateful = stateful
        if graph is None:  # A compiled graph ignores such changes.
            self.stateful[_OF_MODEL] = changed_in_model(model)
            if optimizer is not None:
                self.stateful[_OF_OPTIMIZER] = changed_in_optimizer(model, optimizer)
        self._random = RandomStates(model)
        self.last_step = -1

    def save(
        self,
        name: str,
        iteration: int | None = None,
        is_last: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint, completely or not at all.

        Args:
            name: name of the checkpoint's directory below `save_dir`.
            iteration: index of the last finished step, -1 before the first step; by default `last_step`.
            is_last: make it the checkpoint from which a resume continues.
            extra: further numbers and strings to keep.

        Raises:
            CheckpointError: It could not be written, e.g. because the disk is full. Nothing is left of it. Or a step
                was interrupted after it had read batches.
            TypeError: An object has a state that no checkpoint can store.
        """
        if not self.save_to_disk:
            return
        check_name(name)
        if iteration is None:
            iteration = self.last_step
            for value in self.stateful.values():
                call_if_there(value, "check_finished", iteration)
        import oneflow as flow

        average_statistics(self.model)
        flow._oneflow_internal.eager.Sync()
        states = self._states()
        tensors, step = {_MODEL: dict(self.model.state_dict())}, 0
        if self.optimizer is not None:
            step, tensors[_OPTIMIZER] = optimizer_state.collect(self.model, self.optimizer, self.graph)
        mesh = get_mesh()
        state = {
            "iteration": iteration,
            "optimizer_step": step,
            "optimizer": type(self.optimizer).__name__,
            "mesh": {
                "data": mesh.data_parallel_size,
                "tensor": mesh.tensor_parallel_size,
                "pipeline": mesh.pipeline_parallel_size,
            },
            "stateful": states,
            "extra": dict(extra or {}),
        }
        self._write(name, tensors, {_RANDOM: self._random.gather(iteration), STATE: state}, is_last)
        logger.info("Saved checkpoint %s.", Path(self.save_dir) / name)

    def _write(
        self, checkpoint: str, tensors: Mapping[str, dict[str, Any]], contents: Mapping[str, Any], is_last: bool
    ) -> None:
        """Write the files of tensors and of JSON. Collective; all ranks raise the same error.

        Rank 0 writes while all ranks gather tensors. If the disk fails, the gathering continues, as it is collective.
        """
        target, problem = Path(self.save_dir) / checkpoint, ""
        headers = {name: tensor_header(each) for name, each in tensors.items()}
        arrays = (whole_on_rank0(tensors[name][key]) for name, (_, order) in headers.items() for key in order)
        if is_main_process():
            try:
                with PendingDirectory(target) as pending:
                    for name, (header, order) in headers.items():
                        with pending.open(name) as file:
                            file.write(header)
                            for array in islice(arrays, len(order)):
                                assert array is not None  # this is rank 0
                                write_tensor(file, array)
                    for name, content in contents.items():
                        try:
                            pending.add_json(name, content)
                        except (TypeError, ValueError) as error:
                            raise ValueError(f"{name}: {error}") from error
                    pending.commit()
                if is_last:
                    self._tag(checkpoint)
            except (OSError, ValueError) as error:
                problem = str(error)
        for _ in arrays:  # The rest, which is not written.
            pass
        problem = broadcast_py_object(problem)
        if problem:
            raise CheckpointError(f"checkpoint {target} could not be written: {problem}.")

    def _tag(self, name: str) -> None:
        try:
            self.tag_last_checkpoint(name)
        except OSError:
            # Without the tag, a resume does not find the checkpoint, and the disk is probably full.
            shutil.rmtree(Path(self.save_dir) / name, ignore_errors=True)
            raise

    def _states(self) -> dict[str, Any]:
        """The states of the further objects. Collective; raises TypeError if one cannot be stored, of rank 0 on all."""
        states, problem = {}, ""
        for key, value in self.stateful.items():
            try:
                states[key] = value.state_dict()
            except CheckpointError as error:
                problem = problem or f"checkpoints cannot store the state of the {key} ({error}); return other values"
        problem = broadcast_py_object(problem) or problem
        if problem:
            raise TypeError(problem)
        may_differ = [key for key, value in self.stateful.items() if getattr(value, "may_differ", False)]
        return {**states, **of_all_ranks({key: states[key] for key in may_differ})}

    def note_start(self) -> None:
        """Before the first step: what an optimizer or schedule has now is not stored as changed by the training."""
        for value in self.stateful.values():
            call_if_there(value, "note_start")

    def check_states(self) -> None:
        """After a step: raise TypeError, as `save`, if no checkpoint can store the states that the parts have now."""
        self._states()
        if self.optimizer is not None and self.graph is None:
            optimizer_state.forget_untrained(self.optimizer)
            optimizer_state.collect(self.model, self.optimizer)

    def resume_or_load(self, path: str, *, resume: bool = True) -> dict[str, Any]:
        """Resume from the newest checkpoint, if `resume` is True and there is one; else load the weights of `path`.

        Args:
            path: checkpoint whose weights are loaded if there is no resume; "" for none.

        Returns:
            What `load` returned; {} if nothing was loaded.
        """
        last = self.get_checkpoint_file() if resume else ""
        if last:
            return self.load(last)
        return self.load_weights(path) if path else {}

    def load(self, path: str) -> dict[str, Any]:
        """Restore everything from a checkpoint, which must fit exactly.

        Returns:
            The checkpoint's "iteration", "mesh", "optimizer", "optimizer_step", "extra" and "stateful".

        Raises:
            CheckpointError: It is missing, damaged, or of another model or optimizer.
        """
        directory, state = Path(path), self.read(path)
        if self.optimizer is not None:
            self._check_optimizer(directory, state)
        try:
            self._load_model(directory)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. Resume with the same model, or start a new run with the weights that fit: "
                f"train.load_weight={directory}"
            ) from None
        if self.optimizer is not None:
            optimizer_state.restore(
                state["optimizer_step"], TensorFile(directory / _OPTIMIZER), self.model, self.optimizer, self.graph
            )
        for key, value in self.stateful.items():
            if key not in state["stateful"] and getattr(value, "may_be_absent", False):
                continue
            if key not in state["stateful"]:
                raise CheckpointError(
                    f"{directory} has no state of '{key}'; it has the states of {sorted(state['stateful'])}"
                )
            value.load_state_dict(state["stateful"][key])
        self._random.restore(read_json(directory / _RANDOM), state["iteration"], directory / _RANDOM)
        self.last_step = state["iteration"]
        logger.info("Restored checkpoint %s.", directory)
        return state

    def _check_optimizer(self, directory: Path, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if a checkpoint has no state for an optimizer of this class."""
        own = [each.__name__ for each in type(self.optimizer).__mro__]
        saved = state.get("optimizer", own[0]) if (directory / _OPTIMIZER).is_file() else "no optimizer"
        if saved not in own:
            raise CheckpointError(
                f"{directory} has the state of {saved}, but the training uses {own[0]}; resume with the same "
                f"optimizer, or start a new run with the weights: train.load_weight={directory}"
            )

    def load_weights(self, path: str, may_differ: Sequence[str] = ("*",)) -> dict[str, Any]:
        """Load the weights of a checkpoint that fit the model; the log names each weight that does not fit.

        Args:
            path: its directory.
            may_differ: patterns, such as "head.*", of the names of weights that need not fit.

        Returns:
            {}, since nothing is resumed.

        Raises:
            CheckpointError: It is missing or damaged, no weight fits, or another weight does not fit.
        """
        directory = Path(path)
        try:
            self.check(directory)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. Give the path of a checkpoint: train.load_weight=<checkpoint>") from None
        try:
            self._load_model(directory, may_differ)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. Patterns name the weights that may differ: train.load_weight_may_differ=['head.*']"
            ) from None
        logger.info("Loaded the weights of checkpoint %s.", directory)
        return {}

    def _load_model(self, directory: Path, may_differ: Sequence[str] = ()) -> None:
        file = TensorFile(directory / _MODEL)
        model: dict[str, Any] = dict(self.model.state_dict())
        stored = set(file.names())
        unexpected = sorted(stored - set(model))
        problems: dict[str, str] = {}
        for name, tensor in model.items():
            if name not in stored:
                problems[name] = f"it lacks '{name}'{nearest(name, unexpected)}"
            elif tuple(tensor.shape) != file.shape(name):
                problems[name] = f"'{name}' is {file.shape(name)} instead of {tuple(tensor.shape)}"
        fitting = [name for name in model if name not in problems]
        problems.update((name, f"it has '{name}', which the model does not have") for name in unexpected)
        refused = [
            problem
            for name, problem in problems.items()
            if not fitting or not any(fnmatchcase(name, pattern) for pattern in may_differ)
        ]
        for pattern in may_differ:
            if not any(fnmatchcase(name, pattern) for name in {*model, *stored}):
                refused.append(f"the pattern '{pattern}' matches none of them")
        if refused:
            more = f" and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
            raise CheckpointError(
                f"the weights in {directory} do not fit this model: {'; '.join(refused[:_SHOWN])}{more}"
            )
        for problem in problems.values():
            logger.warning("Weights in %s: %s; left as initialised.", directory, problem)
        for name in fitting:
            fill(model[name], file, name)
