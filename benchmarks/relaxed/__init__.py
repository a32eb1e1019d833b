"""What relaxed recovery costs: AUC and log-loss by how far the dense state lags behind the rows; see ../README.md."""
