"""The command `libai-data state`: show, verify or edit the data state of a checkpoint, and list its samples."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from logging.handlers import BufferingHandler
from typing import Any

import numpy as np

from libai_data.commands.console import print_lines
from libai_data.commands.one_rank import OneRank, one_rank_loaders
from libai_data.config import try_get_key
from libai_data.config.lazy_config import load_config
from libai_data.data.samplers.ledger import Ledger
from libai_data.engine.data_state import OVERRIDE_KEY, check_step
from libai_data.engine.saved_data_state import SavedState, edited, in_words, source_of, sources_of, write_edited
from libai_data.errors import ConfigError


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="libai-data state", description=__doc__)
    verbs = arguments.add_subparsers(dest="verb", required=True, metavar="show|verify|edit|samples")

    def verb(name: str, summary: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=summary, description=summary)
        made.add_argument("checkpoint", help="directory of a checkpoint, or train.output_dir for the last one")
        return made

    def takes_config(made: argparse.ArgumentParser, summary: str) -> None:
        made.add_argument("--config-file", nargs="+", metavar=("FILE", "key=value"), help=summary)

    verb("show", "Show where a run from a checkpoint would continue.")
    verify = verb("verify", "Check a checkpoint's files against its manifest, and its data state against a config.")
    takes_config(verify, "the config to check against, and changes to it as in training")
    edit = verb(
        "edit",
        "Change the data state; the checkpoint from before is kept beside it, as '<name>.before_edit_1'.",
    )
    edit.add_argument("--position", type=int, metavar="N", help="continue as if N samples had been used")
    edit.add_argument(
        "--seed", type=int, metavar="N", help="use another seed from here on; also set train.seed in the config"
    )
    edit.add_argument(
        "--skip", type=int, nargs=2, action="append", metavar=("FIRST", "LAST"), help="leave out these steps' samples"
    )
    edit.add_argument("--forget-skips", action="store_true", help="remove all skips of samples that were not used yet")
    samples = verb("samples", "List the samples of a step, or the steps that used a sample.")
    which = samples.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, metavar="N", help="the step whose samples to list")
    which.add_argument("--sample", type=int, metavar="I", help="the sample (its index in the dataset) to look for")
    takes_config(
        samples,
        "the config of the run, and changes to it; it names the sources if the checkpoint does not list all of them",
    )
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 1 if a checkpoint is damaged or does not fit."""
    asked = parser().parse_args(argv)
    return print_lines(f"state {asked.verb}", lambda: _VERBS[asked.verb](asked), also_told=(IndexError,))


def _verify(asked: argparse.Namespace) -> list[str]:
    saved = SavedState.read(asked.checkpoint)
    lines = [f"The files of {saved.path} are as they were written."]
    if saved.stream.schedule is not None:
        check_step(saved.stream, saved.step, str(saved.path))
        lines.append(f"Step {saved.step} and position {saved.stream.position} match.")
    if asked.config_file:
        lines += _fit(saved, asked.config_file[0], asked.config_file[1:])
    return lines


def _fit(saved: SavedState, config_file: str, opts: Sequence[str]) -> list[str]:
    """Restore the data state into the loader that a config describes."""
    cfg, opened = _configured_loader(saved, config_file, opts)
    loader = opened.loaders[0]
    # On a resume, the sampler logs a warning if samples are repeated or left out.
    notes = BufferingHandler(capacity=sys.maxsize)
    notes.setLevel(logging.WARNING)
    sampler_log = logging.getLogger("libai_data.data.samplers")
    sampler_log.addHandler(notes)
    try:
        loader.load_state_dict(saved.data, override=try_get_key(cfg, OVERRIDE_KEY) or ())
    finally:
        sampler_log.removeHandler(notes)
        loader.close()
    end = "with these differences:" if notes.buffer else "without a difference."
    return [f"A run of {config_file} would continue from it {end}", *(note.getMessage() for note in notes.buffer)]


def _configured_loader(saved: SavedState, config_file: str, opts: Sequence[str]) -> tuple[Any, OneRank]:
    """The config, and the train loader that it describes, on this one process."""
    cfg = load_config(config_file, opts)
    ranks = try_get_key(cfg, "train.dist.data_parallel_size") or saved.content.get("mesh", {}).get("data", 1)
    return cfg, one_rank_loaders(cfg, ranks)


def _ledger_and_sources(saved: SavedState, config: list[str] | None) -> tuple[Ledger, list[tuple[str, int]]]:
    """The ledger; and names and lengths of the datasets that the config joins, or that the checkpoint lists."""
    if not config:
        return Ledger(saved.stream), sources_of(saved.data)
    _, opened = _configured_loader(saved, config[0], config[1:])
    loader = opened.loaders[0]
    opened.close()
    parts = getattr(loader.dataset, "datasets", [loader.dataset])
    if sum(map(len, parts)) != saved.stream.order.size:
        raise ConfigError(
            f"the dataset of {config[0]} has {sum(map(len, parts))} samples, but the dataset of the checkpoint has "
            f"{saved.stream.order.size}"
        )
    stream, batches = saved.stream, {}
    if not stream.order.can_locate:
        # The state alone cannot compute the order, so the order comes from the config's loader.
        loader.load_state_dict(saved.data)
        stream = replace(stream, order=loader.stream.state.order)
        batches = {size: sizes.num_accumulation_steps for size, sizes in opened.plan.sizes.items()}
    return Ledger(stream, batches), [(type(part).__name__, len(part)) for part in parts]


def _edit(asked: argparse.Namespace) -> list[str]:
    saved = SavedState.read(asked.checkpoint)
    skips = [(first, last) for first, last in asked.skip or ()]
    if asked.position is None and asked.seed is None and not skips and not asked.forget_skips:
        raise ConfigError("nothing to change: give --position, --seed, --skip or --forget-skips")
    backup = write_edited(saved, edited(saved, asked.position, asked.seed, skips, asked.forget_skips))
    lines = [
        f"Changed. The checkpoint from before the change is {backup}.",
        *in_words(SavedState.read(str(saved.path))),
    ]
    if asked.seed is not None:
        lines.append(f"Set the same seed in the config: train.seed={asked.seed}.")
    return lines


def _samples(asked: argparse.Namespace) -> list[str]:
    saved = SavedState.read(asked.checkpoint)
    ledger, sources = _ledger_and_sources(saved, asked.config_file)
    if asked.sample is not None:
        uses = ledger.uses_of(asked.sample, saved.step)
        name, own = source_of(sources, asked.sample)
        known = f" from step {ledger.schedule.first_step} on" if ledger.schedule.first_step else ""
        head = (
            f"Sample {asked.sample} ({name}, {own}) was used {len(uses)} time(s) in the {saved.step} steps done{known}."
        )
        return [head, *(f"step {use.step}  row {use.row}  epoch {use.epoch}" for use in uses)]
    epochs, indices = ledger.samples_of(asked.step)
    start = ledger.schedule.position_of(asked.step)
    done = "was" if asked.step < saved.step else "will be"
    lines = [
        f"Step {asked.step} {done} made of {len(indices)} samples, positions {start} to {start + len(indices) - 1}:"
    ]
    if saved.stream.left_out.ranges:
        places = saved.stream.left_out.places_of(np.array([start, start + len(indices) - 1]))
        first, last = ledger.schedule.steps_at(places).tolist()
        lines.append(
            f"In a run without skips, these samples belong to steps {first} to {last}; train.skip_steps counts such "
            "steps."
        )
    for row, (epoch, index) in enumerate(zip(epochs.tolist(), indices.tolist())):
        name, own = source_of(sources, index)
        lines.append(f"row {row}  epoch {epoch}  index {index}  source {name}  {own}")
    return lines


_VERBS = {
    "show": lambda asked: in_words(SavedState.read(asked.checkpoint)),
    "verify": _verify,
    "edit": _edit,
    "samples": _samples,
}
