"""Code that runs in the notebook's kernel: IPython and ipyparallel, never torch."""
