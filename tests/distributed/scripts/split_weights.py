"""Checks optimizers of weights that the ranks split: `split_weights.py FOLDER`. Each rank notes the errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from libai_data.engine.built_parts import check_fit
from libai_data.errors import ConfigError
from libai_data.mesh.current import get_mesh, get_rank

import oneflow as flow  # isort: skip

ranks = [[*range(get_mesh().world_size)]]
found = []
for kind, sbp in (("LAMB", flow.sbp.split(0)), ("LAMB", flow.sbp.broadcast), ("AdamW", flow.sbp.split(0))):
    model = flow.nn.Linear(2, 2)
    model.to_global(flow.placement("cpu", ranks), [flow.sbp.split(0), sbp])  # The first axis has one rank.
    try:
        check_fit(model, getattr(flow.optim, kind)(model.parameters()), None)
        found.append("")
    except ConfigError as error:
        found.append(str(error))
Path(sys.argv[1], f"{get_rank()}.json").write_text(json.dumps(found))
