"""The rank that reads fails to open its loader, in several ways, one after the other: `fail_to_open.py FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import oneflow as flow

from libai_data import DataLoader, from_iterable
from libai_data.config import LazyCall
from libai_data.delivery import shared_loader
from libai_data.delivery.build import build_nlp_train_loader
from libai_data.errors import ConfigError, ContractError
from libai_data.loader.arena import Arena
from libai_data.mesh.current import set_mesh
from libai_data.mesh.parallel_mesh import ParallelMesh


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Rows:
    def __init__(self, fails: str = "") -> None:
        if fails == "exits":
            sys.exit("no data here")
        if fails == "cannot say why":
            raise Speechless

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return {"x": np.array(index)}


def opened(fails: str) -> Any:
    """A batch, or the error."""
    refused = mock.Mock(side_effect=OSError("no room for another descriptor"))
    patches = {"has no link": (shared_loader, "open_node_link"), "has no memory": (Arena, "__init__")}
    try:
        dataset = LazyCall(Rows)(fails=fails)
        with mock.patch.object(*patches.get(fails, (shared_loader, "json_")), refused, create=fails not in patches):
            loader = build_nlp_train_loader(dataset, 2, readers="node", num_workers=0)[0]
        batch = next(iter(loader)).x.tensor.numpy().tolist()
        loader.close()
        return batch
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"


set_mesh(ParallelMesh(4, 1, 1, rank=flow.env.get_rank()))


def given(**odd: Any) -> str:
    """What a rank is told that gives other arguments than the rank that reads."""
    arguments = {"batch_size": 2, **(odd if flow.env.get_rank() == 2 else {"num_workers": 0})}
    try:
        DataLoader(Rows(), readers="node", **arguments)
        return ""
    except ConfigError as error:
        return str(error)


def begun_with_state_on(rank: int) -> str:
    """What a rank is told if one alone has loaded a state; the rank that reads is told nothing."""
    loader = DataLoader(Rows(), 2, readers="node")
    if flow.env.get_rank() == rank:
        loader.load_state_dict({**loader.state_dict(), "position": 8})
    try:
        next(iter(loader))
        return ""
    except ContractError as error:
        return str(error)


def begun_with_epoch_on(rank: int) -> str:
    """The same for an epoch of an iterable."""
    loader = from_iterable(lambda epoch: iter([{"x": epoch}]), 1, ends="pad", readers="node")
    if flow.env.get_rank() == rank:
        loader.set_epoch(5)
    try:
        next(iter(loader))
        return ""
    except ContractError as error:
        return str(error)


found = {fails: opened(fails) for fails in ("exits", "cannot say why", "has no link", "has no memory", "")}
found["other arguments"] = [given(batch_size=4, seed=1), given(fields=["x"], num_workers=1), given(num_workers=1)]
found["a state on one rank"] = [begun_with_state_on(0), begun_with_state_on(2)]
found["an epoch on one rank"] = [begun_with_epoch_on(0), begun_with_epoch_on(2)]
Path(sys.argv[1], f"{flow.env.get_rank()}.json").write_text(json.dumps(found))
