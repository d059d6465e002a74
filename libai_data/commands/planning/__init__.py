"""What a job of any size would read, hold and send, worked out without starting it."""
