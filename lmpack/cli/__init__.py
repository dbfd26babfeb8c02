"""The command line: one module per command, and the frame that finds them."""
