"""Checkpoints: directories of safetensors and JSON, written completely or not at all, for any mesh. No pickle."""

from libai_data.engine.checkpoint.checkpointer import Checkpointer

__all__ = ["Checkpointer"]
