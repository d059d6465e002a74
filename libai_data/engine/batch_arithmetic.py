"""How the batch sizes of a step hang together."""

from __future__ import annotations

from dataclasses import dataclass

from libai_data.errors import ConfigError


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of a step, complete and consistent.

    Args:
        micro_batch_size: samples of one batch on one data-parallel rank (`train.train_micro_batch_size`).
        num_accumulation_steps: batches in a step.
        global_batch_size: samples of a step over all ranks; the product of these two and the data-parallel size.
    """

    micro_batch_size: int
    num_accumulation_steps: int
    global_batch_size: int


def complete_batch_sizes(
    micro_batch_size: int | None,
    global_batch_size: int | None,
    num_accumulation_steps: int | None,
    data_parallel_size: int,
) -> BatchSizes:
    """Fill in what is missing: global = micro x accumulation x data-parallel size.

    Args:
        micro_batch_size: `train.train_micro_batch_size`, or None.
        global_batch_size: `train.global_batch_size`, or None.
        num_accumulation_steps: `train.num_accumulation_steps`; where it is open, 1.
        data_parallel_size: of the mesh.

    Returns:
        All three.

    Raises:
        ConfigError: They contradict each other, do not divide, or neither batch size is given.
    """
    for key, value in (
        ("train_micro_batch_size", micro_batch_size),
        ("global_batch_size", global_batch_size),
        ("num_accumulation_steps", num_accumulation_steps),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"train.{key} is {value!r}; it must be a whole number of at least 1, or None")
    if micro_batch_size is None and global_batch_size is None:
        raise ConfigError("neither train.train_micro_batch_size nor train.global_batch_size is set; set one of them")
    if global_batch_size is None:
        assert micro_batch_size is not None  # the check above
        steps = num_accumulation_steps or 1
        return BatchSizes(micro_batch_size, steps, micro_batch_size * steps * data_parallel_size)
    if micro_batch_size is None:
        steps = num_accumulation_steps or 1
        micro_batch_size = _divide(global_batch_size, "num_accumulation_steps", steps, data_parallel_size)
        return BatchSizes(micro_batch_size, steps, global_batch_size)
    if num_accumulation_steps is None:
        steps = _divide(global_batch_size, "train_micro_batch_size", micro_batch_size, data_parallel_size)
        return BatchSizes(micro_batch_size, steps, global_batch_size)
    product = micro_batch_size * num_accumulation_steps * data_parallel_size
    if global_batch_size != product:
        raise ConfigError(
            f"train.global_batch_size is {global_batch_size}, but train_micro_batch_size x num_accumulation_steps x "
            f"data_parallel_size is {micro_batch_size} x {num_accumulation_steps} x {data_parallel_size} = {product}; "
            "leave one of them None to have it computed"
        )
    return BatchSizes(micro_batch_size, num_accumulation_steps, global_batch_size)


def _divide(global_batch_size: int, name: str, size: int, data_parallel_size: int) -> int:
    quotient, rest = divmod(global_batch_size, size * data_parallel_size)
    if rest:
        raise ConfigError(
            f"train.global_batch_size is {global_batch_size}, which is no multiple of {name} x data_parallel_size = "
            f"{size} x {data_parallel_size} = {size * data_parallel_size}; change one of them"
        )
    return quotient
