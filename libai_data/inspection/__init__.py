"""Looking at what a config feeds to its model: a page, and measurements."""

from libai_data.inspection.inspection import Inspection, inspect_config
from libai_data.inspection.page import page_of

__all__ = ["Inspection", "inspect_config", "page_of"]
