"""Programs that drive other engines, each run by the Python of that engine's own environment.

They import nothing of specdec: `peer_protocol.py` beside them is all they share. Started by
`specdec.cli.comparing.peers`.
"""
