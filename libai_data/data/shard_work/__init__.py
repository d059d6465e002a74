"""Work that several processes do in shards, and that can resume after an interruption."""
