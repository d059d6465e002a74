"""One module per suite, found by its name: each has `rows(scale)`, which returns the suite's rows."""
