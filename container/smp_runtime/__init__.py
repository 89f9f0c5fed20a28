"""The engine that runs in every rank; scripts reach it through ``smdistributed.modelparallel.torch``."""
