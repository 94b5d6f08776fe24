"""The command line: the only folder that may import all the others."""
