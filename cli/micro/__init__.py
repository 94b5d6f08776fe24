"""The work behind `specdec bench --micro`."""
