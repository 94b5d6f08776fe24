"""The work behind `specdec replay`."""
