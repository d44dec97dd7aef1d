"""What the table of published batch sizes needs: a model and ways of spreading it of their time."""
