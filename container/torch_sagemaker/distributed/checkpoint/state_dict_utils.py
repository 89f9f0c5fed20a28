"""Names of scripts for version 2; the logic is in ``smp_version2.checkpoint.state_dict_utils``."""

from smp_version2.checkpoint.state_dict_utils import SMStateDictType, init_optim_state, sm_state_dict_type

__all__ = [
    "SMStateDictType",
    "init_optim_state",
    "sm_state_dict_type",
]
