"""Functions of the checks, ``check_NAME`` for each check of the catalog.

Each runs in a process of its own. A function ``rank_…`` runs in every process of a job that a check starts.
"""
