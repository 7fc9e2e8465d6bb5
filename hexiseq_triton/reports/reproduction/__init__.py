"""What `hexiseq reproduce` shows: the page in docs, plots, and lines on the terminal."""
