"""Your own training loop: mesh, loaders, checkpoints, resume in the middle of an epoch, evaluation."""

import json
import sys
from pathlib import Path

import libai_data  # isort: skip  # before oneflow: it finds the CUDA libraries

import numpy as np
import oneflow as flow

from libai_data import to_global
from libai_data.mesh import convert_to_distributed_default_setting, is_main_process, synchronize
from libai_data.structures import batch_info

SAMPLES, TEST_SAMPLES, EPOCHS, SAVE_EVERY = 200, 50, 4, 5


def sample(number: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(number).standard_normal(4).astype(np.float32)
    return {"x": x, "y": x.sum(keepdims=True)}


def main(folder: Path) -> None:
    libai_data.init()  # all ranks on the data axis; init(tensor=2) splits layers over two
    flow.manual_seed(1)
    model = convert_to_distributed_default_setting(flow.nn.Linear(4, 1))  # the same on all ranks
    optimizer = flow.optim.SGD(model.parameters(), lr=0.02)
    train = libai_data.DataLoader([sample(n) for n in range(SAMPLES)], global_batch_size=16, shuffle=True, seed=1)
    test = libai_data.DataLoader([sample(SAMPLES + n) for n in range(TEST_SAMPLES)], global_batch_size=16)
    step, last, new = 0, folder / "last.json", folder / "unfinished.json"
    if last.exists():  # resume in the middle of the epoch
        saved = json.loads(last.read_text())
        step = saved["step"]
        model.load_state_dict(flow.load(str(folder / saved["model"]), global_src_rank=0))
        train.load_state_dict(saved["data"])
    while step < EPOCHS * len(train):
        for batch in train:
            x, y = to_global(batch).values()  # or model(**to_global(batch))
            flow.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % SAVE_EVERY == 0:
                flow.save(model.state_dict(), str(folder / f"model_{step}"), global_dst_rank=0)
                data = train.state_dict()
                if is_main_process():
                    new.write_text(json.dumps({"step": step, "model": f"model_{step}", "data": data}))
                    new.replace(last)  # in one step: a kill leaves the old state or the new one
                synchronize()
    total = 0.0
    for batch in test:
        x, y = to_global(batch).values()
        valid = batch_info(batch).valid  # type: ignore[union-attr]  # rows after these are padding
        total += float(((model(x) - y).numpy()[:valid] ** 2).sum())
    if is_main_process():
        print(f"after {step} steps the mean squared error of {TEST_SAMPLES} samples is {total / TEST_SAMPLES:.6f}")


main(Path(sys.argv[-1]))  # --max-restarts of the launcher adds --resume before it
