"""The device path on a GPU: kernels, transfers and whole steps beside what the machine allows; see __main__.py."""
