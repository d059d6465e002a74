"""Work that is done in shards, by several processes, and goes on from where it was stopped."""
