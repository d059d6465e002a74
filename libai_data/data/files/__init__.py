"""What keeps files apart and remembers them."""
