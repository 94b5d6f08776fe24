"""Informativeness estimators, one file for each kind; the registry that names them is `entropy`."""
