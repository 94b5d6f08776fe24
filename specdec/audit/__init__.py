"""Is speculation lossless here, by which criterion, at which precision? And what does a lossy rule cost?

One module per level of the audit (C0 to C5), each returning a `LevelResult`; `run.py` puts them in order.
A claim of losslessness is (criterion, precision, batch regime), so every figure carries the three. Knows the
engine from outside only: it wraps the runner to watch, and never changes what is computed. Levels: see
`levels.py`.
"""
