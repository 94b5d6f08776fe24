"""The work behind `specdec sweep`."""
