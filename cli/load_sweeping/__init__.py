"""The work behind `specdec load-sweep`."""
