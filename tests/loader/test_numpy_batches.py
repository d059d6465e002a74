"""`loader.numpy()`: the batches of the loader as arrays, in a process that never imports OneFlow."""

from __future__ import annotations

import json
import sys
from itertools import islice
from typing import Any

import numpy as np
import pytest

from libai_data import DataLoader
from libai_data.structures import batch_info
from tests.deadline import run_to_end
from tests.properties import slowly

SCRIPT = """
import json, sys
import numpy as np

class NoOneFlow:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "oneflow":
            raise RuntimeError("OneFlow is imported")

sys.meta_path.insert(0, NoOneFlow())
from libai_data import DataLoader

class Pictures:
    def __len__(self):
        return 7

    def __getitem__(self, index):
        return {"pixels": np.full((2, 2), index, np.uint8), "about": {"name": str(index)}}

def stream(epoch):
    return (Pictures()[index] for index in np.random.default_rng(epoch).permutation(7))

def collate(samples):
    names = [each["about"]["name"] for each in samples]
    return {"pixels": np.stack([each["pixels"] for each in samples]), "about": {"name": names}}

def plain(batch):
    return [batch["pixels"].tolist(), batch["about"]["name"]]

found = {}
for name, source, arguments in (
    ("shuffled", Pictures(), {"shuffle": True}),
    ("workers", Pictures(), {"shuffle": True, "num_workers": 2}),
    ("node", Pictures(), {"shuffle": True, "readers": "node"}),
    ("sampler", Pictures(), {"sampler": [3, 1, 5, 6]}),
    ("list", [Pictures()[index] for index in range(7)], {"weights": np.arange(7)}),
    ("stream", stream, {}),
    ("collated", Pictures(), {"collate_fn": collate}),
):
    loader = DataLoader(source, 3, **arguments)
    whole = [plain(batch) for _ in range(2) for batch in loader.numpy()]
    resumed = DataLoader(source, 3, **arguments)
    next(iter(resumed.numpy()))
    state = json.loads(json.dumps(resumed.state_dict()))
    resumed.close()
    loader.load_state_dict(state)
    assert [plain(batch) for batch in loader.numpy()] == whole[1:len(whole) // 2], name
    loader.close()
    found[name] = whole
assert "oneflow" not in sys.modules
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> Any:
    result = run_to_end([sys.executable, "-c", SCRIPT], 300)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_no_kind_of_loader_imports_oneflow(found: Any) -> None:
    assert found["workers"] == found["node"] == found["shuffled"]
    pixels = [row[0][0] for batch, _ in found["shuffled"] for row in batch]
    assert sorted(pixels[:7]) == sorted(pixels[7:]) == list(range(7))
    assert [names for _, names in found["sampler"]] == [["3", "1", "5"], ["6"]] * 2


def test_arrays_hold_what_the_tensors_of_the_loader_hold(found: Any) -> None:
    samples = [{"pixels": np.full((2, 2), index, np.uint8), "about": {"name": str(index)}} for index in range(7)]
    loader = DataLoader(samples, 3, shuffle=True)
    tensors = [[batch["pixels"].numpy().tolist(), batch["about"]["name"]] for _ in range(2) for batch in loader]
    assert tensors == found["shuffled"]


@pytest.mark.parametrize("num_workers", [0, slowly(2)])
def test_arrays_and_tensors_take_turns_in_one_stream_and_kept_views_stay_valid(num_workers: int) -> None:
    loader = DataLoader([{"x": np.full(4, index)} for index in range(40)], 2, ends="cycle", num_workers=num_workers)
    arrays = loader.numpy()
    assert len(arrays) == len(loader) == 20
    kept = [batch["x"][1:] for batch in islice(iter(arrays), 18)]
    assert [view[0, 0] for view in kept] == list(range(1, 37, 2))
    assert next(iter(loader))["x"].numpy()[:, 0].tolist() == [36, 37]
    batch = next(iter(arrays))
    info = batch_info(batch)
    assert batch["x"][:, 0].tolist() == [38, 39] and info is not None and info.position == 38
    loader.close()
    assert [view[0, 0] for view in kept] == list(range(1, 37, 2))


def test_arrays_have_the_methods_and_attributes_of_their_loader() -> None:
    arrays = DataLoader([{"x": number} for number in range(8)], 2, shuffle=True, seed=1).numpy()
    next(iter(arrays))
    assert (arrays.batch_size, arrays.state_dict()["position"], len(arrays)) == (2, 2, 4)
    arrays.set_epoch(0)
    assert sorted(np.concatenate([batch["x"] for batch in arrays])) == list(range(8))
    arrays.close()
    with pytest.raises(AttributeError, match="'close_all'"):
        arrays.close_all()
