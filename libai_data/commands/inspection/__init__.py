"""Shows the samples that a config feeds to its model, as an HTML page."""

from libai_data.commands.inspection.inspection import Inspection, inspect_config
from libai_data.commands.inspection.page import page_of

__all__ = ["Inspection", "inspect_config", "page_of"]
