"""The first sample of a pass, from which a loader and all ranks see whether reading it again gives the same."""

from __future__ import annotations

import zlib
from typing import Any, Callable

from libai_data.data.datasets.streamed_shards import StreamedShards
from libai_data.data.items import contents_of
from libai_data.data.random.global_generators import WHAT_TO_WRITE
from libai_data.data.samplers.cyclic import CyclicSampler
from libai_data.data.samplers.single_round import SingleRoundSampler
from libai_data.loader.sample_form import SampleForm


def read_by_all(stream: Any, dataset: Any, position: int) -> tuple[int, int] | None:
    """Epoch and index of the first sample of the global batch at a position, if every rank can be asked for that one.

    With lanes, and of streamed shards, a rank or node need not have the files of other ranks.
    """
    if not isinstance(stream, (CyclicSampler, SingleRoundSampler)) or stream.makes_outputs or stream.order.lanes > 1:
        return None
    batch = None if StreamedShards(dataset).sources else stream.serving((0,)).batch_at(position)
    return None if batch is None else (int(batch.epochs[0]), int(batch.indices[0]))


def compared(sample: Any, form: SampleForm, read: Callable[[], Any], dataset: str, index: int) -> SampleForm:
    """Read a sample again.

    Args:
        sample: what was read.
        form: the same, taken apart.
        read: reads it again.
        dataset: name of its class, for the warning.
        index: of the sample, for the warning.

    Returns:
        The form with its checksum, or with a warning if it is another one now; as it was, if that cannot be said.
    """
    try:
        before, tensors = contents_of(sample), contents_of(form.fields)
        again = contents_of(read())
    except Exception:  # Nothing comes of it but a comparison.
        return form
    changed = [name for name in before if again.get(name) != before[name]]
    if not changed:
        return form._replace(checksum=zlib.crc32(repr(tensors).encode())) if tensors else form
    warning = (
        f"{dataset} returns another {' and '.join(map(repr, changed[:3]))} each time that sample {index} is read. So "
        f"batches depend on who reads them and how often, and a resumed run gets others. If it draws, {WHAT_TO_WRITE}; "
        "if it counts or reads the clock, use the index"
    )
    return form._replace(warning=warning)
