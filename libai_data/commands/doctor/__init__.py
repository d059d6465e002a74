"""Checks all ranks of a job before its first step: same code and config, connections, memory, storage."""

from libai_data.commands.doctor.doctor import main

__all__ = ["main"]
