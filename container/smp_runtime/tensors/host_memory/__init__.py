"""Host memory that a GPU copies to and from: pinned in its exact size, and unpinned before it is freed."""
