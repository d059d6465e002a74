"""Reading samples into the rows of a batch: what workers, threads and the trainer's own process do alike."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from libai_data.errors import SampleError, SchemaError
from libai_data.loader.schema import SampleSchema, array_of
from libai_data.sample_random import clear_current_sample, set_current_sample
from libai_data.structures import DistTensorData, Fields, check_field_names, fields_of

Rows = Mapping[str, np.ndarray]
"""Field name -> writable array [rows, ...], the place of some samples within a batch."""


class SampleReader:
    """Reads samples of one dataset; each process or thread that reads has its own.

    Args:
        dataset: `dataset[index]` returns an Instance or a dict. Where there is `read_batch(indices, out)`, it is called
            instead with the indices int64 [n] and the arrays {field: [n, ...]} that it is to fill; failing this,
            `__getitems__(indices)`, which returns a list of samples.
        seed: with epoch and index it decides what random transforms draw.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self._read_batch: Optional[Callable[..., Any]] = getattr(dataset, "read_batch", None)
        self._get_items: Optional[Callable[..., Any]] = getattr(dataset, "__getitems__", None)

    def sample(self, epoch: int, index: int) -> Fields:
        """Read one sample.

        Raises:
            SampleError: The dataset raised; its exception is the cause.
        """
        set_current_sample(self.seed, epoch, index)
        try:
            return self.dataset[index]
        except Exception as error:
            raise self._failure(str(index), error) from error
        finally:
            clear_current_sample()

    def samples(self, epochs: np.ndarray, indices: np.ndarray) -> List[Fields]:
        """Read some samples, in this order; see `sample`."""
        if self._get_items is not None:
            try:
                return list(self._get_items(indices.tolist()))
            except Exception as error:
                raise self._failure(f"one of {indices.tolist()}", error) from error
        return [self.sample(epoch, index) for epoch, index in zip(epochs.tolist(), indices.tolist())]

    def read_into(self, schema: SampleSchema, rows: Rows, epochs: np.ndarray, indices: np.ndarray) -> None:
        """Read samples straight into their rows.

        Args:
            schema: what every sample must look like.
            rows: {field: [n, ...]}.
            epochs: int64 [n].
            indices: int64 [n].

        Raises:
            SampleError: The dataset raised, or a sample does not fit the schema; the index is named.
        """
        if self._read_batch is not None:
            try:
                self._read_batch(indices, rows)
            except Exception as error:
                raise self._failure(f"one of {indices.tolist()}", error) from error
        elif self._get_items is not None:
            for row, sample in enumerate(self.samples(epochs, indices)):
                self.write_row(schema, rows, row, sample, int(indices[row]))
        else:
            for row, (epoch, index) in enumerate(zip(epochs.tolist(), indices.tolist())):
                self.write_row(schema, rows, row, self.sample(epoch, index), index)

    def write_row(self, schema: SampleSchema, rows: Rows, row: int, sample: Fields, index: int) -> None:
        """Copy one sample into its row, if it fits the schema."""
        try:
            _write(schema, rows, row, fields_of(sample))
        except SchemaError as error:
            raise self._failure(str(index), error) from error

    def _failure(self, index: str, error: Exception) -> SampleError:
        name = type(self.dataset).__name__
        return SampleError(f"sample {index} of {name}: {type(error).__name__}: {error}")


def _write(schema: SampleSchema, rows: Rows, row: int, fields: Dict[str, Any]) -> None:
    if len(fields) != len(schema.fields):
        check_field_names(list(fields), schema.names, "the sample")
    for spec in schema.fields:
        if spec.name not in fields:
            check_field_names(list(fields), schema.names, "the sample")
        value = fields[spec.name]
        if isinstance(value, DistTensorData):
            if tuple(value.sbp_list) != spec.layout.sbp_list or value.placement_idx != spec.layout.placement_idx:
                raise SchemaError(
                    f"field '{spec.name}' is laid out as {value.sbp_list} on layer {value.placement_idx}, in the "
                    f"samples before it as {list(spec.layout.sbp_list)} on layer {spec.layout.placement_idx}"
                )
            value = value.tensor
        array = value if isinstance(value, np.ndarray) else array_of(value, spec.name)
        if array.shape != spec.shape or array.dtype != spec.dtype:
            raise SchemaError(
                f"field '{spec.name}' is {array.dtype} {list(array.shape)}, in the samples before it "
                f"{spec.describe()}; make all samples alike, or use a padding collator"
            )
        rows[spec.name][row] = array


def collated_fields(batch: Any) -> Tuple[Dict[str, np.ndarray], Dict[str, Any]]:
    """Take apart what a collator returned.

    Args:
        batch: an Instance or a dict of fields with a batch dim.

    Returns:
        Arrays by field name, and the fields as they came (for their layouts).

    Raises:
        SchemaError: A field is no tensor.
    """
    fields = fields_of(batch)
    return {name: array_of(value, name) for name, value in fields.items()}, fields


def row_slices(count: int, parts: int) -> Sequence[slice]:
    """Cut `count` rows into up to `parts` slices of nearly equal length."""
    edges = np.linspace(0, count, min(parts, count) + 1).astype(int)
    return [slice(int(a), int(b)) for a, b in zip(edges[:-1], edges[1:])]
