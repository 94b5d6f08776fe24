"""The work behind `specdec report`."""
