"""Keys against hashing, on data whose items come and go."""
