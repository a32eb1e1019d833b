"""Files: configurations read strictly, writes that are durable, locks, manifests."""
