"""Layer selection: which residual-stream boundaries a draft head should read."""
