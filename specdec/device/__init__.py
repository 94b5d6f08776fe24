"""Serving on a device through the kernels: packed batches in, tensors that stay there out.

The processor's own path is `specdec.runner`; this one is for cards, and runs on the processor for tests.
"""
