"""The work behind `specdec study`."""
