"""The rows of a batch: collections of embedding bags, and how a step gets at its rows."""
