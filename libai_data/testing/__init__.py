"""Checks for tests of loaders, of this package or of others: does a loader keep its promises?"""

from libai_data.testing.conformance import CHECKS, Finding, Report, check_conformance

__all__ = ["CHECKS", "Finding", "Report", "check_conformance"]
