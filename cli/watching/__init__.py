"""The work behind `specdec watch`."""
