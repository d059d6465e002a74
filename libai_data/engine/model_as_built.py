"""The model that a compiled graph has: later changes of the model do not reach the graph."""

from __future__ import annotations

from typing import Any

from libai_data.errors import ConfigError


class ModelAsBuilt:
    """The parts of a model when its graph is built, and their modes and numbers when the graph is compiled.

    Args:
        model: a OneFlow module.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._members = _members_of(model)
        # The name of a mode, such as "model.head.training" -> the module or parameter that has this mode, and the mode.
        modules, parameters = model.named_modules(prefix="model"), model.named_parameters("model")
        self._parts = {
            f"{name}.{mode}": (part, mode)
            for named, mode in ((modules, "training"), (parameters, "requires_grad"))
            for name, part in named
        }
        self._modes: dict[str, bool] = {}
        self._numbers: list[tuple[str, dict[str, Any], dict[str, Any]]] = []

    def begin(self) -> None:
        """Keep modes and numbers, because the compilation begins.

        Raises:
            ConfigError: A module, parameter or buffer was replaced or added after the graph was built.
        """
        added = next((name for name in _members_of(self._model) if name not in self._members), "")
        problem = _new_since(f"{added} was added") if added else self._replaced()
        if problem:
            raise ConfigError(problem)
        self._modes = {name: getattr(part, mode) for name, (part, mode) in self._parts.items()}
        self._numbers = [
            (name, vars(part), {key: value for key, value in vars(part).items() if _is_number(key, value)})
            for name, part in self._model.named_modules(prefix="model")
        ]

    def difference(self) -> str:
        """Why the graph does not compute what the model would now, as the text of an error; "" if it does."""
        problem = self._replaced()
        if problem:
            return problem
        for name, (part, mode) in self._parts.items():
            if mode == "training" and (part._forward_hooks or part._forward_pre_hooks):
                return (
                    f"{name.rpartition('.')[0]} has forward hooks, as weight_norm registers them, which a graph does "
                    "not call. Write their work in forward, or set graph.enabled=False"
                )
            now, compiled = getattr(part, mode), self._modes[name]
            if now != compiled:
                return (
                    f"{name} is {now}, but the graph is compiled for {compiled}. Set it before the first step, or set "
                    "graph.enabled=False"
                )
        return ""

    def changed_number(self) -> str:
        """The first number or text of a module that has another value now, in words; "" if there is none."""
        for name, own, compiled in self._numbers:
            for key, value in compiled.items():
                if own.get(key) is not value and own.get(key) != value:  # NaN differs from itself
                    return f"{name}.{key} is now {own.get(key)!r}, but the graph is compiled for {value!r}"
        return ""

    def forget_numbers(self) -> None:
        """Compare numbers no more."""
        self._numbers = []

    def _replaced(self) -> str:
        for name, (owner, key, part) in self._members.items():
            if owner.get(key) is not part:
                return _new_since(f"{name} was replaced")
        return ""


def _members_of(model: Any) -> dict[str, tuple[dict[str, Any], str, Any]]:
    """The name of each module, parameter and buffer of a model -> the dict that has it, its key there, and itself."""
    return {
        f"{name}.{key}": (owner, key, part)
        for name, module in model.named_modules(prefix="model")
        for owner in (module._modules, module._parameters, module._buffers)
        for key, part in owner.items()
    }


def _is_number(key: str, value: Any) -> bool:
    """Whether an attribute is a number or text that `forward` may use; the mode is compared by itself."""
    return isinstance(value, (int, float, str)) and key != "training"


def _new_since(what: str) -> str:
    return (
        f"{what} after the graph was built, which does not have it. Do this before, as in build_model, change it in "
        "place, or set graph.enabled=False"
    )
