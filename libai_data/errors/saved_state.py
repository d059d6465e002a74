"""Which keys and values a saved state must have, and the error of a state that lacks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from libai_data.errors import CheckpointError
from libai_data.errors.argument_rules import Rule


@dataclass(frozen=True)
class Keys:
    """The keys that a saved mapping must and may have: key -> rule for the value; or `Keys`, if it is a mapping."""

    required: Mapping[str, Rule | Keys]
    optional: Mapping[str, Rule | Keys] = field(default_factory=dict)
    others: bool = False  # whether other keys are allowed; other code checks them


def check_state(state: Any, keys: Keys, saved_by: str, name: str = "", subject: str = "the data state") -> None:
    """Raise CheckpointError if a state lacks keys, has unknown ones, or values that break their rules.

    Args:
        saved_by: who saves such states, in words for the message.
        name: path of this part in the whole state; "" for all of it.
        subject: the whole state, in words for the message.
    """
    what = f"{subject}'s {name}" if name else subject
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{what} is {state!r:.200}; it must be a mapping, as {saved_by} saves it")
    rules = {**keys.required, **keys.optional}
    missing = sorted(set(keys.required) - set(state))
    unknown = [] if keys.others else [key for key in state if key not in rules]
    if missing or unknown:
        wrong = " and ".join([f"lacks {missing}"] * bool(missing) + [f"has the unknown {unknown}"] * bool(unknown))
        raise CheckpointError(f"{what} {wrong}; it was not saved by {saved_by} of this version: {dict(state)!r:.500}")
    for key, rule in rules.items():
        if key not in state:
            continue
        path = f"{name}.{key}" if name else key
        if isinstance(rule, Keys):
            check_state(state[key], rule, saved_by, path, subject)
        elif not rule.accepts(state[key]):
            raise CheckpointError(f"{subject}'s {rule.problem(path, state[key])}")
