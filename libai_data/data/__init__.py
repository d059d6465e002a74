"""From files to samples, and their order."""
