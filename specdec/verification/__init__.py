"""Which drafted tokens are committed: every rule, its random numbers, and what law it emits.

`result.py` holds the words, `registry.py` the rules by name; one file per rule family holds the rules.
"""
