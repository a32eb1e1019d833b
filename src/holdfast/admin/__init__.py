"""What is done to a pool beside training it: inspect, verify, repair, digest, snapshot, export, import."""
