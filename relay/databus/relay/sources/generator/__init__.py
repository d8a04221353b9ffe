"""The generator: a source without a database, for tests and benchmarks.

``generator_source`` is the source, ``generator_kernels`` packs its frames.
"""
