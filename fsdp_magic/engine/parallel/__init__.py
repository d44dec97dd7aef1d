"""Ways to spread a model over ranks, one technique a file."""
