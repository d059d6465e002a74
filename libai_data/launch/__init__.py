"""Starts ranks on this machine and on others, ends them together, and restarts them after a failure."""
