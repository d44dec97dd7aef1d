"""ENGINE: a training step under fake tensors, in a process of its own or a fork of an engine."""
