"""For tests of loaders, ours and others': what a user may rely on, checked."""

from libai_data.testing.conformance import check_conformance
from libai_data.testing.report import CHECKS, Finding, Report

__all__ = ["CHECKS", "Finding", "Report", "check_conformance"]
