"""ScratchPipe's comparison of caches, run on holdfast's own engine: see __main__.py."""
