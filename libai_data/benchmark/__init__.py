"""The benchmark: what the pipeline promises about speed and memory, measured beside its peers and limits."""
