"""Drafters and draft heads."""
