"""Data modules, with the loaders of all stages of a training in one class: this package's own, and Lightning's."""

from libai_data.engine.datamodule.data_stages import DataStages
from libai_data.engine.datamodule.datamodule import DataModule

__all__ = ["DataModule", "DataStages"]
