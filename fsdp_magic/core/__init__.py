"""Pure code: standard library only, no input or output, no clock, the same in every process."""
