"""A look at all ranks of a job before its first step: do they run the same, reach each other, have what they need?"""

from libai_data.commands.doctor.doctor import main

__all__ = ["main"]
