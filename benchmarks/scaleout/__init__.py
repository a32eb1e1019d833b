"""Scale-out: several ranks on one machine, and what crosses the wire between them."""
