"""Looking at what a config feeds to its model: a page, a picture, and measurements."""
