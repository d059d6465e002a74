"""Identities and memory maps of files, and indices that are cached in files."""
