"""The ranks of a job as processes: how they connect, exchange messages, and notice that a rank has ended."""
