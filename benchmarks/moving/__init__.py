"""How fast a large log store's rows move about: see `__main__`."""
