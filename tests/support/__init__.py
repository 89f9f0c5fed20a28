"""What tests share: models, the training that they are compared with, and the ranks, jobs and clouds that they run on.

Tests import these modules as ``support.…``; ``pythonpath`` in ``setup.cfg`` finds them, and the rank pool's processes
inherit the path.
"""
