"""OpenEmbedding (Chen et al., ICDE 2023), simulated unseen."""
