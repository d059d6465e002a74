"""Starts ranks on this machine and on others, ends them together, and starts them again."""
