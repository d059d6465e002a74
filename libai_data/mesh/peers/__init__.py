"""The ranks of a job as processes: how they meet, speak with each other, and notice that one is gone."""
