"""The work behind `specdec bench`: points, sides, figures and records."""
