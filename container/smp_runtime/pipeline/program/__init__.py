"""The step program: the calls of a planned step in groups that the root stage need not request one by one."""
