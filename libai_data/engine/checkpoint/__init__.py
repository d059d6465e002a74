"""Checkpoints: directories of safetensors and JSON, written whole or not at all, loadable on any mesh. No pickle."""

from libai_data.engine.checkpoint.checkpointer import Checkpointer

__all__ = ["Checkpointer"]
