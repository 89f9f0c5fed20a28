"""An overview of all ranks of a job: how each spends its time, and which ranks slow down the others."""
