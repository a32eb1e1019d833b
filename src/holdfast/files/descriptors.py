"""The descriptors of a process's standard streams."""

from __future__ import annotations

import os


def fill_standard_descriptors() -> None:
    """Has those of the descriptors 0 to 2 that are closed, as those of a daemon may be, lead to /dev/null.

    A file that is opened gets the lowest number that is free. A file of a pool that got 1 or 2 would be overwritten by
    whatever is printed, or said by a library that fails. Raises OSError where there is no /dev/null.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
