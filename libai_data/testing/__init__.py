"""For tests of loaders, ours and others': what a user may rely on, checked."""

from libai_data.testing.conformance import CHECKS, Finding, Report, check_conformance

__all__ = ["CHECKS", "Finding", "Report", "check_conformance"]
