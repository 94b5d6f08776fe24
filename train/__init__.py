"""Training of draft heads on the target's own answers."""
