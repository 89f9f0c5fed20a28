"""PyTorch's private names: the runtime takes each from here, under a public name of this package.

A release may rename or drop any of them. A missing name has a fallback here, or fails at its first use with an
error that names the release; the rest of the runtime works. ``tests/runtime/test_torch_private.py`` tries
each. So after an update it shows which function here has to be fixed.

A few names stay where they are used, :data:`IN_PLACE`: those that a subclass overrides or that every author
of modules knows, for which a function would only hide what happens. The same tests try them.
"""

from __future__ import annotations

from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

from smp_runtime.tensors.torch_private.autograd import at_end_of_backward as at_end_of_backward
from smp_runtime.tensors.torch_private.autograd import backward_pass as backward_pass
from smp_runtime.tensors.torch_private.autograd import indexing_in_transforms as indexing_in_transforms
from smp_runtime.tensors.torch_private.autograd import is_transformed as is_transformed
from smp_runtime.tensors.torch_private.autograd import loss_reduction as loss_reduction
from smp_runtime.tensors.torch_private.autograd import outside_transforms as outside_transforms
from smp_runtime.tensors.torch_private.autograd import run_backward as run_backward
from smp_runtime.tensors.torch_private.autograd import running_node as running_node
from smp_runtime.tensors.torch_private.autograd import saved_tensor_hooks as saved_tensor_hooks
from smp_runtime.tensors.torch_private.autograd import taken_apart as taken_apart
from smp_runtime.tensors.torch_private.autograd import will_run as will_run
from smp_runtime.tensors.torch_private.dispatch import ITEM as ITEM
from smp_runtime.tensors.torch_private.dispatch import SHARING as SHARING
from smp_runtime.tensors.torch_private.dispatch import TorchDispatchMode as TorchDispatchMode
from smp_runtime.tensors.torch_private.dispatch import compile_errors as compile_errors
from smp_runtime.tensors.torch_private.dispatch import count_function_modes as count_function_modes
from smp_runtime.tensors.torch_private.dispatch import default_device as default_device
from smp_runtime.tensors.torch_private.dispatch import dispatch_modes as dispatch_modes
from smp_runtime.tensors.torch_private.dispatch import is_operator as is_operator
from smp_runtime.tensors.torch_private.dispatch import never_compiled as never_compiled
from smp_runtime.tensors.torch_private.dispatch import packet_of as packet_of
from smp_runtime.tensors.torch_private.dispatch import schema_of as schema_of
from smp_runtime.tensors.torch_private.dispatch import stay_in as stay_in
from smp_runtime.tensors.torch_private.dispatch import without_modes as without_modes
from smp_runtime.tensors.torch_private.fsdp import JOINED_PARAMETER as JOINED_PARAMETER
from smp_runtime.tensors.torch_private.fsdp import free_gathered_parameters as free_gathered_parameters
from smp_runtime.tensors.torch_private.fsdp import is_outermost as is_outermost
from smp_runtime.tensors.torch_private.fsdp import keeps_parameters as keeps_parameters
from smp_runtime.tensors.torch_private.fsdp import lacking_gradients as lacking_gradients
from smp_runtime.tensors.torch_private.fsdp import name_without_wrappers as name_without_wrappers
from smp_runtime.tensors.torch_private.groups import abort_process_groups as abort_process_groups
from smp_runtime.tensors.torch_private.groups import absent_store as absent_store
from smp_runtime.tensors.torch_private.groups import all_gather_single as all_gather_single
from smp_runtime.tensors.torch_private.groups import all_gather_single_coalesced as all_gather_single_coalesced
from smp_runtime.tensors.torch_private.groups import count_collectives as count_collectives
from smp_runtime.tensors.torch_private.groups import default_store as default_store
from smp_runtime.tensors.torch_private.groups import give_backends as give_backends
from smp_runtime.tensors.torch_private.groups import group_of_operation as group_of_operation
from smp_runtime.tensors.torch_private.groups import name_group as name_group
from smp_runtime.tensors.torch_private.groups import set_timeout as set_timeout
from smp_runtime.tensors.torch_private.groups import timeout_of as timeout_of
from smp_runtime.tensors.torch_private.in_place import IN_PLACE as IN_PLACE
from smp_runtime.tensors.torch_private.lookup import TESTED as TESTED
from smp_runtime.tensors.torch_private.modules import NORMS_WITH_STATISTICS as NORMS_WITH_STATISTICS
from smp_runtime.tensors.torch_private.modules import IncompatibleKeys as IncompatibleKeys
from smp_runtime.tensors.torch_private.modules import activation_wrappers as activation_wrappers
from smp_runtime.tensors.torch_private.modules import before_loading as before_loading
from smp_runtime.tensors.torch_private.modules import call_with_hooks as call_with_hooks
from smp_runtime.tensors.torch_private.modules import device_asked_for as device_asked_for
from smp_runtime.tensors.torch_private.modules import dtype_asked_for as dtype_asked_for
from smp_runtime.tensors.torch_private.profiling import of_all_threads as of_all_threads
from smp_runtime.tensors.torch_private.profiling import record_memory_history as record_memory_history
from smp_runtime.tensors.torch_private.profiling import write_memory_history as write_memory_history
from smp_runtime.tensors.torch_private.tensors import DisableTorchFunction as DisableTorchFunction
from smp_runtime.tensors.torch_private.tensors import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from smp_runtime.tensors.torch_private.tensors import can_take_contents as can_take_contents
from smp_runtime.tensors.torch_private.tensors import gradient_hooks as gradient_hooks
from smp_runtime.tensors.torch_private.tensors import has_step_hooks as has_step_hooks
from smp_runtime.tensors.torch_private.tensors import key_of_storage as key_of_storage
from smp_runtime.tensors.torch_private.tensors import make_subclass as make_subclass
from smp_runtime.tensors.torch_private.tensors import make_without_elements as make_without_elements
from smp_runtime.tensors.torch_private.tensors import norms_of as norms_of
from smp_runtime.tensors.torch_private.tensors import rebuild_parameter as rebuild_parameter
from smp_runtime.tensors.torch_private.tensors import set_gradient_hooks as set_gradient_hooks
from smp_runtime.tensors.torch_private.tensors import storage_key as storage_key
from smp_runtime.tensors.torch_private.tensors import swap_contents as swap_contents
from smp_runtime.tensors.torch_private.tensors import unscale as unscale
from smp_runtime.tensors.torch_private.tensors import values_of as values_of
