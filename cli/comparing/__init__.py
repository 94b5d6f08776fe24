"""The work behind `specdec compare`: our engine and its peers."""
