"""Reads one step of a config, and collects what the page shows about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from libai_data.commands.inspection.cards import Card, cards_of, decoder_of, rows_to_show
from libai_data.commands.inspection.fields import FieldReport, field_report
from libai_data.commands.inspection.findings import Bars, findings, histograms
from libai_data.commands.inspection.step_rows import Stage, StepRows, read_step, stages_of_sample
from libai_data.commands.one_rank import SPLITS, mesh_of, one_rank_loaders
from libai_data.config import try_get_key
from libai_data.data.attributes import attribute_of, has_attribute
from libai_data.data.items import named
from libai_data.data.nesting import taken_apart
from libai_data.delivery.read_plan import read_mode
from libai_data.engine.models import build_configured_tokenizer
from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import check, one_of, whole
from libai_data.iterables.iterable_loader import indexed_dataset_of
from libai_data.loader.failures import ErrorPolicy
from libai_data.loader.reading import SampleReader
from libai_data.loader.schema import array_of
from libai_data.mesh.parallel_mesh import ParallelMesh

STAGES = ("source", "transform", "copy")
"""The stages that `loader.stats()` measures."""

_RULES = {"--samples": whole(1), "--step": whole(0), "--split": one_of(*SPLITS)}
_READ = 256  # the table and the warnings use so many rows of a step, or all if it has fewer


@dataclass
class Inspection:
    """What the page shows about one step of a config."""

    title: str  # the config, in words
    facts: list[tuple[str, str]]  # (name, value) about step, mesh and dataset
    findings: list[str]  # what looks wrong, one sentence each
    cards: list[Card]  # the samples
    reports: dict[str, FieldReport]  # field -> its report
    mesh: ParallelMesh  # the mesh of the training
    readers: str = "every_rank"  # the read mode; see `ReadPlan`
    histograms: dict[str, Bars] = field(default_factory=dict)  # title -> bars of labels, lengths or values
    stats: dict[str, Any] = field(default_factory=dict)  # the loader's stats, after the step was read


def inspect_config(
    cfg: Any,
    title: str = "",
    split: str = "train",
    step: int = 0,
    samples: int = 16,
    mesh: ParallelMesh | None = None,
) -> Inspection:
    """Read a step as the ranks of a mesh would, on this process alone, and describe the step.

    Args:
        cfg: the whole config; it is not changed.
        title: title of the page.
        split: "train", "valid" or "test", the first of the test loaders.
        step: number of the training's step, or of the evaluation's batch, from 0.
        samples: how many samples the page shows.
        mesh: by default the smallest that `train.dist` allows.

    Raises:
        ConfigError: There is no such split or step, or the config is wrong.
        SampleError: A sample could not be read.
    """
    check(_RULES, **{"--samples": samples, "--step": step, "--split": split})
    mesh = mesh_of(cfg) if mesh is None else mesh
    tokenizer = build_configured_tokenizer(cfg)
    opened = one_rank_loaders(cfg, mesh.data_parallel_size, split, tokenizer=tokenizer)
    try:
        if not opened.loaders:
            raise ConfigError(f"--split is {split!r}, but the config has no such loader")
        loader: Any = opened.loaders[0]
        rows = read_step(
            opened, split, loader, step, mesh.data_parallel_size, cfg.train.test_micro_batch_size, max(samples, _READ)
        )
        return _described(cfg, title, split, rows, loader, samples, mesh, tokenizer)
    finally:
        opened.close()


def _described(
    cfg: Any, title: str, split: str, rows: StepRows, loader: Any, samples: int, mesh: ParallelMesh, tokenizer: Any
) -> Inspection:
    stats = loader.stats() if callable(attribute_of(loader, "stats")) else {}
    shown = rows_to_show(rows, samples)
    stages = _stages(loader, rows, shown)
    reports = {field_name: field_report(field_name, rows, mesh) for field_name in rows.values}
    section = "dataloader.test.0" if split == "test" else "dataloader.train"
    readers = read_mode(try_get_key(cfg, f"{section}.readers") or "every_rank")
    dataset: Any = indexed_dataset_of(loader)
    length = f", {len(dataset):,} samples" if has_attribute(dataset, "__len__") else ""
    facts = [
        ("split", split),
        ("step", f"{rows.step}: {rows.size} samples, positions {rows.position} to {rows.position + rows.size - 1}"),
        ("read", f"{len(rows.origins)} of them, {len(shown)} shown"),
        ("dataset", f"{type(dataset).__name__}{length}" if dataset is not None else type(loader).__name__),
        ("seed", str(try_get_key(cfg, "train.seed"))),
        ("mesh", f"{mesh.world_size} rank(s) on {mesh.num_nodes} node(s): {mesh.sizes_in_words}"),
        ("a rank's batch", f"{rows.micro_batch_size} samples; readers: {readers}"),
    ]
    found = findings(rows, reports, cfg)
    if attribute_of(loader, "takes_shard", False) and mesh.data_parallel_size > 1:
        found.append(
            "The source yields the rows of each data-parallel rank by itself. The rows shown are those of a job with "
            "one such rank, so steps of this mesh have other samples."
        )
    cards = cards_of(rows, shown, stages, decoder_of(tokenizer))
    drawn = histograms(rows, _raw_lengths(loader, rows))
    return Inspection(title, facts, found, cards, reports, mesh, readers, drawn, stats)


def _stages(loader: Any, rows: StepRows, shown: Sequence[int]) -> dict[int, list[Stage]]:
    dataset, seed = indexed_dataset_of(loader), attribute_of(loader, "seed", 0)
    by_row: dict[int, list[Stage]] = {}
    for origin in (rows.origins[row] for row in shown):
        if origin.index is None or origin.epoch is None:
            return {}
        stages = stages_of_sample(dataset, seed, origin.epoch, origin.index)
        if stages:
            by_row[origin.row] = stages
    return by_row


def _raw_lengths(loader: Any, rows: StepRows) -> dict[str, list[int]]:
    """Lengths of the samples of each field that the collator pads; a field of unchanged lengths is left out."""
    if not rows.collated or any(origin.index is None for origin in rows.origins):
        return {}
    reader = SampleReader(loader.dataset, loader.seed, ErrorPolicy("raise", None))
    lengths: dict[str, list[int]] = {}
    for origin in rows.origins:
        leaves: dict[str, Any] = {}
        taken_apart(named(reader.sample(origin.epoch or 0, origin.index or 0)), leaves)
        for name, value in leaves.items():
            if name in rows.values and (array := array_of(value, name)).ndim:
                lengths.setdefault(name, []).append(len(array))
    return {name: each for name, each in lengths.items() if each != [len(value) for value in rows.values[name]]}
